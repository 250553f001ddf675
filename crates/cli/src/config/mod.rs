//! Configuration file (TOML), merged with the command-line flags.

mod changes;
mod check;
mod schema;

use std::fmt::Display;
use std::path::Path;
use std::str::FromStr;

use clap::{Args, Command};
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use tidegate::gate::{admission, transmit};
use tidegate::host::PacketClasses;
use tidegate_apps::requests::{RequestPolicy, RequestsConfig};

pub(crate) use self::changes::ConfigChanges;
pub(crate) use self::check::CheckCommand;
use crate::Failure;

/// Configuration file: its sections, whose keys are the names of the flags.
#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct ConfigFile {
    host: toml::Table,
    dns: toml::Table,
    echo: toml::Table,
    http: toml::Table,
    nfs: toml::Table,
    gate: toml::Table,
    admission: Option<admission::Config>,
    requests: Option<RequestsConfig>,
    transmit: Option<transmit::Config>,
}

/// Options that the configuration file holds in one section.
pub(crate) trait Section: Serialize + DeserializeOwned {
    /// Name of the section.
    const NAME: &'static str;
}

/// Section of the file, with a command whose flags are its keys.
pub(crate) type SectionFlags = (&'static str, Command);

/// The section of these options.
pub(crate) fn flags_of<S: Section + Args>() -> SectionFlags {
    (S::NAME, S::augment_args(Command::new(S::NAME)))
}

/// Value written as text in flags and in the configuration file: `FromStr` reads it, `Display`
/// writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AsText<T>(pub(crate) T);

impl<T: FromStr> FromStr for AsText<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> Result<Self, T::Err> {
        text.parse().map(AsText)
    }
}

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

/// Returns the flags, with unset flags taken from the file's section. Flags take precedence.
///
/// # Errors
/// When the file cannot be read, or has an unknown key or a bad value. The message has the path
/// of the file and, for TOML errors, the line and column where known.
pub(crate) fn merge_file<S: Section>(flags: S, file: Option<&Path>) -> Result<S, Failure> {
    let Some(path) = file else { return Ok(flags) };
    let fail = |error: &dyn Display| format!("{}: {error}", path.display());
    let file = read(path)?;
    let section = match S::NAME {
        "host" => file.host,
        "dns" => file.dns,
        "gate" => file.gate,
        "http" => file.http,
        "nfs" => file.nfs,
        _ => file.echo,
    };
    // Deserialized alone first, so that an error in the file is reported as the file's.
    let section: S = section
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

/// Returns the flags that set these options: those of the command line's form of the section.
///
/// # Errors
/// When an option cannot be written as text.
pub(crate) fn to_flags<S: Section>(options: &S) -> Result<Vec<String>, Failure> {
    let Value::Object(options) = serde_json::to_value(options)? else { return Ok(Vec::new()) };
    let mut flags = Vec::new();
    for (name, value) in options.into_iter().filter(|(_, value)| !is_unset(value)) {
        let values = match value {
            Value::Bool(_) => {
                flags.push(format!("--{name}"));
                continue;
            }
            Value::Array(values) => values,
            value => vec![value],
        };
        flags.extend(values.iter().map(|value| match value {
            Value::String(text) => format!("--{name}={text}"),
            number => format!("--{name}={number}"),
        }));
    }
    Ok(flags)
}

/// Returns the admission classes of section `[admission]` of the file; without the section the
/// default classes if `flag` is set, else `None`.
///
/// # Errors
/// When the file cannot be read or has an error. The message has the path of the file and, for
/// TOML errors, the line and column where known.
pub(crate) fn admission(
    flag: bool,
    path: Option<&Path>,
) -> Result<Option<admission::Config>, Failure> {
    let classes = path.map(read).transpose()?.and_then(|file| file.admission);
    Ok(classes.or_else(|| flag.then(admission::Config::default)))
}

/// Returns the classes of requests of section `[requests]`; `None` without the section.
///
/// # Errors
/// As [`admission`], and when the section contradicts itself.
pub(crate) fn requests(path: Option<&Path>) -> Result<Option<RequestPolicy>, Failure> {
    let Some(path) = path else { return Ok(None) };
    let policy = read(path)?.requests.map(|requests| requests.compile()).transpose();
    Ok(policy.map_err(|error| format!("{}: section [requests]: {error}", path.display()))?)
}

/// Returns the classes of packets: those of [`admission`] and of [`transmit_classes`].
///
/// # Errors
/// As these.
pub(crate) fn packet_classes(
    admission_flag: bool,
    path: Option<&Path>,
) -> Result<PacketClasses, Failure> {
    let admission = admission(admission_flag, path)?;
    Ok(PacketClasses { admission, transmit: transmit_classes(path)? })
}

/// Returns the transmit classes of section `[transmit]` of the file, if it has one.
///
/// # Errors
/// As [`admission`].
pub(crate) fn transmit_classes(path: Option<&Path>) -> Result<Option<transmit::Config>, Failure> {
    let Some(path) = path else { return Ok(None) };
    let classes = read(path)?.transmit;
    if let Some(classes) = &classes {
        classes.check().map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(classes)
}

fn read(path: &Path) -> Result<ConfigFile, Failure> {
    let fail = |error: &dyn Display| format!("{}: {error}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| fail(&error))?;
    Ok(toml::from_str(&text).map_err(|error| fail(&error))?)
}

/// Reads the file as it is, whatever its sections are.
fn read_table(path: &Path) -> Result<toml::Table, Failure> {
    let fail = |error: &dyn Display| format!("{}: {error}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| fail(&error))?;
    Ok(text.parse().map_err(|error: toml::de::Error| fail(&error))?)
}

/// Returns true for the JSON value of a flag that was not given.
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

    fn config_file(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        file
    }

    #[test]
    fn options_become_flags_again() {
        let options = Options {
            iface: Some("a".into()),
            shared: true,
            frames: Some(1),
            address: vec!["x".into(), "y".into()],
        };
        let mut flags = to_flags(&options).unwrap();
        flags.sort_unstable();
        assert_eq!(flags, ["--address=x", "--address=y", "--frames=1", "--iface=a", "--shared"]);
        assert!(to_flags(&Options::default()).unwrap().is_empty());
    }

    #[test]
    fn flags_take_precedence_over_file() {
        let file = config_file("[host]\niface = 'a'\nshared = true\nframes = 1\naddress = ['x']\n");
        let flags = Options { iface: Some("b".into()), ..Options::default() };
        let merged = merge_file(flags, Some(file.path())).unwrap();
        let expected = Options {
            iface: Some("b".into()),
            shared: true,
            frames: Some(1),
            address: vec!["x".into()],
        };
        assert_eq!(merged, expected);
    }

    #[test]
    fn reports_unknown_key_with_section() {
        let file = config_file("[host]\nifcae = 'a'\n");
        let error = merge_file(Options::default(), Some(file.path())).unwrap_err().to_string();
        assert!(error.contains("ifcae") && error.contains("[host]"), "{error}");
    }

    #[test]
    fn names_missing_file() {
        let error = merge_file(Options::default(), Some(Path::new("no-such.toml"))).unwrap_err();
        assert!(error.to_string().contains("no-such.toml"), "{error}");
    }
}
