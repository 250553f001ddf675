//! One TOML file instead of flags.

use std::fmt::Display;
use std::path::Path;
use std::str::FromStr;

use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use tidegate::gate::admission;

use crate::Failure;

/// The file's sections; each has the names of the flags it stands for.
#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct File {
    host: toml::Table,
    dns: toml::Table,
    echo: toml::Table,
    http: toml::Table,
    gate: toml::Table,
    admission: Option<admission::Config>,
}

/// Options that a section of the file can hold.
pub(crate) trait Section: Serialize + DeserializeOwned {
    /// The section's name.
    const NAME: &'static str;
}

/// A value that flags and the file both write as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Text<T>(pub(crate) T);

impl<T: FromStr> FromStr for Text<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> Result<Self, T::Err> {
        text.parse().map(Text)
    }
}

impl<T: Display> Serialize for Text<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de, T: FromStr<Err: Display>> Deserialize<'de> for Text<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Text).map_err(|error| D::Error::custom(format!("{text:?}: {error}")))
    }
}

/// The flags, with what they leave open taken from the file.
///
/// # Errors
/// Names the file, and the line and column where it can.
pub(crate) fn over<S: Section>(flags: S, file: Option<&Path>) -> Result<S, Failure> {
    let Some(path) = file else { return Ok(flags) };
    let fail = |error: &dyn Display| format!("{}: {error}", path.display());
    let file = read(path)?;
    let section = match S::NAME {
        "host" => file.host,
        "dns" => file.dns,
        "gate" => file.gate,
        "http" => file.http,
        _ => file.echo,
    };
    // Checked alone first, so that an error in the file is told as one.
    let _: S = section
        .clone()
        .try_into()
        .map_err(|error: toml::de::Error| fail(&format_args!("section [{}]: {error}", S::NAME)))?;
    let mut merged = serde_json::to_value(section)?;
    if let (Value::Object(merged), Value::Object(flags)) =
        (&mut merged, serde_json::to_value(&flags)?)
    {
        merged.extend(flags.into_iter().filter(|(_, value)| !is_unset(value)));
    }
    Ok(serde_json::from_value(merged)?)
}

/// The classes of admission: those of section `[admission]` of the file, or those
/// that there are anyway if the flag asks for them.
///
/// # Errors
/// Names the file, and the line and column where it can.
pub(crate) fn admission(
    flag: bool,
    path: Option<&Path>,
) -> Result<Option<admission::Config>, Failure> {
    let classes = path.map(read).transpose()?.and_then(|file| file.admission);
    Ok(classes.or_else(|| flag.then(admission::Config::default)))
}

fn read(path: &Path) -> Result<File, Failure> {
    let fail = |error: &dyn Display| format!("{}: {error}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| fail(&error))?;
    Ok(toml::from_str(&text).map_err(|error| fail(&error))?)
}

/// Whether a flag was not given.
fn is_unset(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(values) => values.is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize, Deserialize, Default, Debug, PartialEq)]
    #[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
    struct Options {
        iface: Option<String>,
        shared: bool,
        frames: Option<u32>,
        address: Vec<String>,
    }

    impl Section for Options {
        const NAME: &'static str = "host";
    }

    fn file(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        file
    }

    #[test]
    fn flags_win_over_the_file() {
        let file = file("[host]\niface = 'a'\nshared = true\nframes = 1\naddress = ['x']\n");
        let flags = Options { iface: Some("b".into()), ..Options::default() };
        let merged = over(flags, Some(file.path())).unwrap();
        let expected = Options {
            iface: Some("b".into()),
            shared: true,
            frames: Some(1),
            address: vec!["x".into()],
        };
        assert_eq!(merged, expected);
    }

    #[test]
    fn an_unknown_name_is_an_error_that_says_where() {
        let file = file("[host]\nifcae = 'a'\n");
        let error = over(Options::default(), Some(file.path())).unwrap_err().to_string();
        assert!(error.contains("ifcae") && error.contains("[host]"), "{error}");
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = over(Options::default(), Some(Path::new("no-such.toml"))).unwrap_err();
        assert!(error.to_string().contains("no-such.toml"), "{error}");
    }
}
