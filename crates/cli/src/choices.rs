//! Flags with a fixed set of named values.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

/// Named value of a flag: name, value, help.
pub(crate) type Choice<T> = (&'static str, T, &'static str);

/// Returns a parser that accepts the names of `choices` and lists these with their help.
pub(crate) fn choices<T, const N: usize>(
    choices: [Choice<T>; N],
) -> impl TypedValueParser<Value = T>
where
    T: Clone + Send + Sync + 'static,
{
    let values = choices.clone().map(|(name, _, help)| PossibleValue::new(name).help(help));
    PossibleValuesParser::new(values).try_map(move |given| {
        let mut found = choices.iter().filter(|(name, ..)| *name == given);
        found.next().map(|(_, value, _)| value.clone()).ok_or("not one of the possible values")
    })
}
