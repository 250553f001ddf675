//! Serialized forms of fields whose types have none of their own.

use std::fmt::Display;
use std::net::IpAddr;
use std::str::FromStr;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tidegate_device::fault::{FaultConfig, FaultRates};
use tidegate_stack::Route;

/// Value as text: `Display` writes it, `FromStr` reads it.
struct AsText<T>(T);

impl<T: Display> Serialize for AsText<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de, T: FromStr<Err: Display>> Deserialize<'de> for AsText<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(AsText).map_err(|error| D::Error::custom(format!("{text:?}: {error}")))
    }
}

/// One value as text.
pub(super) mod text {
    use super::*;

    pub(crate) fn serialize<T: Display, S: Serializer>(
        value: &T,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        AsText(value).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<T, D::Error> {
        AsText::deserialize(deserializer).map(|text| text.0)
    }
}

/// An optional value, or a list of values, each as text.
pub(super) mod texts {
    use super::*;

    pub(crate) fn serialize<'a, T: Display + 'a, S: Serializer>(
        values: &'a (impl IntoIterator<Item = T> + Clone),
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(values.clone().into_iter().map(AsText))
    }

    pub(crate) fn deserialize<'de, T, C, D>(deserializer: D) -> Result<C, D::Error>
    where
        T: FromStr<Err: Display>,
        C: IntoIterator<Item = T> + FromTexts<T>,
        D: Deserializer<'de>,
    {
        let texts = Vec::<AsText<T>>::deserialize(deserializer)?;
        Ok(C::from_texts(texts.into_iter().map(|text| text.0)))
    }

    /// Collection of values that were texts.
    pub(crate) trait FromTexts<T> {
        fn from_texts(texts: impl Iterator<Item = T>) -> Self;
    }

    impl<T> FromTexts<T> for Vec<T> {
        fn from_texts(texts: impl Iterator<Item = T>) -> Self {
            texts.collect()
        }
    }

    impl<T> FromTexts<T> for Option<T> {
        fn from_texts(mut texts: impl Iterator<Item = T>) -> Self {
            texts.next()
        }
    }
}

/// Routes, as pairs of prefix and gateway.
pub(super) mod routes {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(
        routes: &[Route],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(routes.iter().map(|route| (AsText(route.prefix), route.gateway)))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<Route>, D::Error> {
        let pairs = Vec::<(AsText<_>, Option<IpAddr>)>::deserialize(deserializer)?;
        Ok(pairs.into_iter().map(|(prefix, gateway)| Route { prefix: prefix.0, gateway }).collect())
    }
}

/// Faults: the seed, then the rates of each direction.
pub(super) mod faults {
    use super::*;

    type Encoded = (u64, [f64; 4], [f64; 4]);

    fn encode(rates: FaultRates) -> [f64; 4] {
        [rates.loss, rates.duplication, rates.reordering, rates.corruption]
    }

    fn decode([loss, duplication, reordering, corruption]: [f64; 4]) -> FaultRates {
        FaultRates::default()
            .loss(loss)
            .duplication(duplication)
            .reordering(reordering)
            .corruption(corruption)
    }

    pub(crate) fn serialize<S: Serializer>(
        faults: &Option<FaultConfig>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let encoded: Option<Encoded> =
            faults.map(|faults| (faults.seed, encode(faults.receive), encode(faults.transmit)));
        encoded.serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<FaultConfig>, D::Error> {
        let encoded = Option::<Encoded>::deserialize(deserializer)?;
        Ok(encoded.map(|(seed, receive, transmit)| {
            FaultConfig::default().seed(seed).receive(decode(receive)).transmit(decode(transmit))
        }))
    }
}
