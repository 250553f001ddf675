//! Settings as data (feature `serde`): numbers, ranges and prefixes as a configuration file writes
//! them.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::admission::{NumberRange, PayloadBytes, ProtocolMatch};
use crate::config::Quota;

impl Serialize for Quota {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Packets(packets) => serializer.serialize_u32(*packets),
            Self::Unlimited => serializer.serialize_str("unlimited"),
        }
    }
}

impl<'de> Deserialize<'de> for Quota {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        enum Word {
            Unlimited,
        }
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a number of packets, or \"unlimited\"")]
        enum Either {
            Packets(u32),
            Word(Word),
        }
        Ok(match Either::deserialize(deserializer)? {
            Either::Packets(packets) => Self::Packets(packets),
            Either::Word(Word::Unlimited) => Self::Unlimited,
        })
    }
}

/// Implements serde for a type that is written as text or as a number.
macro_rules! written_as_text {
    ($type:ty, $expecting:literal) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                #[derive(Deserialize)]
                #[serde(untagged, expecting = $expecting)]
                enum Either {
                    Number(u32),
                    Text(String),
                }
                let text = match Either::deserialize(deserializer)? {
                    Either::Number(number) => number.to_string(),
                    Either::Text(text) => text,
                };
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

written_as_text!(NumberRange, "a number, or a range like \"1024-65535\"");
written_as_text!(ProtocolMatch, "the name or number of a protocol");

impl Serialize for PayloadBytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PayloadBytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Serde functions for prefixes, which are written as text.
pub(crate) mod cidr {
    use serde::{Deserialize, Deserializer, Serializer};
    use tidegate_wire::IpCidr;

    pub(crate) fn serialize<S: Serializer>(
        cidr: &Option<IpCidr>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match cidr {
            Some(cidr) => serializer.collect_str(cidr),
            None => serializer.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<IpCidr>, D::Error> {
        let text = String::deserialize(deserializer)?;
        let wrong = |error| serde::de::Error::custom(format!("{text:?}: {error}"));
        text.parse().map(Some).map_err(wrong)
    }
}
