//! JSON schema of the configuration file, for editors that check TOML.
//!
//! Sections whose keys are flags are made from the flags: names, types, choices and help. The
//! sections with classes are in `classes.schema.json`.

use std::any::TypeId;
use std::num::{NonZeroU16, NonZeroU32, NonZeroUsize};

use clap::builder::PossibleValue;
use clap::{Arg, ArgAction, Command};
use serde_json::{Map, Value, json};
use tidegate_gate::Quota;

use super::flags_of;
use crate::gate::GateOptions;
use crate::host::HostOptions;
use crate::{Failure, router, serve};

/// Schemas of the sections `admission`, `requests` and `transmit`.
const CLASSES: &str = include_str!("classes.schema.json");

/// The schema of a configuration file of servers, daemon and router.
///
/// # Errors
/// If the schema of the classes is no JSON.
pub(super) fn schema() -> Result<Value, Failure> {
    let mut sections: Map<String, Value> = serde_json::from_str(CLASSES)?;
    let flags = [flags_of::<HostOptions>(), flags_of::<GateOptions>(), router::section_flags()];
    for (name, command) in flags.into_iter().chain(serve::section_flags()) {
        sections.insert(name.to_owned(), section(&command));
    }
    Ok(json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration file of Tidegate",
        "type": "object",
        "additionalProperties": false,
        "properties": sections,
    }))
}

fn section(command: &Command) -> Value {
    let mut keys = Map::new();
    for flag in command.get_arguments() {
        let names = flag.get_long().into_iter().chain(flag.get_all_aliases().unwrap_or_default());
        for name in names {
            keys.insert(name.to_owned(), key(flag));
        }
    }
    json!({ "type": "object", "additionalProperties": false, "properties": keys })
}

fn key(flag: &Arg) -> Value {
    let mut schema = match flag.get_action() {
        ArgAction::SetTrue => json!({ "type": "boolean" }),
        ArgAction::Append => json!({ "type": "array", "items": value(flag) }),
        _ if flag.get_value_delimiter().is_some() => {
            json!({ "type": "array", "items": value(flag) })
        }
        _ => value(flag),
    };
    let help = flag.get_long_help().or_else(|| flag.get_help());
    schema["description"] = json!(help.map(ToString::to_string));
    schema
}

/// Schema of one value of a flag, by the type that its text is parsed to.
fn value(flag: &Arg) -> Value {
    let parsed = flag.get_value_parser().type_id();
    let is_any_of = |types: &[TypeId]| types.iter().any(|id| parsed == *id);
    let integers =
        [TypeId::of::<u8>(), TypeId::of::<u16>(), TypeId::of::<u32>(), TypeId::of::<u64>()];
    let positive =
        [TypeId::of::<NonZeroU16>(), TypeId::of::<NonZeroU32>(), TypeId::of::<NonZeroUsize>()];
    let choices = flag.get_possible_values();
    if is_any_of(&[TypeId::of::<bool>()]) {
        json!({ "type": "boolean" })
    } else if !choices.is_empty() {
        let names: Vec<&str> = choices.iter().map(PossibleValue::get_name).collect();
        json!({ "enum": names })
    } else if is_any_of(&integers) || is_any_of(&[TypeId::of::<usize>()]) {
        json!({ "type": "integer", "minimum": 0 })
    } else if is_any_of(&positive) {
        json!({ "type": "integer", "minimum": 1 })
    } else if is_any_of(&[TypeId::of::<f64>()]) {
        json!({ "type": "number" })
    } else if is_any_of(&[TypeId::of::<Quota>()]) {
        json!({ "anyOf": [{ "type": "integer", "minimum": 1 }, { "const": "unlimited" }] })
    } else {
        json!({ "type": "string" })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::PathBuf;

    use serde::de::DeserializeOwned;
    use tidegate::gate::{admission, transmit};
    use tidegate_apps::requests::{RequestClassConfig, RequestMatch, RequestsConfig};

    use super::*;

    fn root() -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
    }

    /// The published schema. `TIDEGATE_GOLDEN=write` makes it anew.
    #[test]
    fn published_schema_is_up_to_date() {
        let path = root().join("docs/tidegate.schema.json");
        let made = format!("{:#}\n", schema().unwrap());
        if std::env::var("TIDEGATE_GOLDEN").is_ok_and(|word| word == "write") {
            fs::write(&path, &made).unwrap();
        }
        let published = fs::read_to_string(&path).unwrap();
        assert!(published == made, "run this test with TIDEGATE_GOLDEN=write");
    }

    /// Keys that a table may have, from the error about one that it may not have.
    fn keys_of<T: DeserializeOwned>() -> BTreeSet<String> {
        let error = toml::from_str::<T>("no-such-key = 1").err().unwrap().to_string();
        let expected = error.split("expected").nth(1).unwrap();
        expected.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    }

    fn properties(schema: &Value, path: &[&str]) -> BTreeSet<String> {
        let table = path.iter().fold(schema, |at, key| &at["properties"][key]["items"]);
        table["properties"].as_object().unwrap().keys().cloned().collect()
    }

    #[test]
    fn every_key_of_the_classes_is_in_the_schema() {
        let schema = schema().unwrap();
        let section = |name: &str| schema["properties"][name].clone();
        let (class, rule) = (&["class"][..], &["class", "match"][..]);
        let packets = section("admission");
        assert_eq!(properties(&packets, &[]), keys_of::<admission::Config>());
        assert_eq!(properties(&packets, class), keys_of::<admission::Class>());
        assert_eq!(properties(&packets, rule), keys_of::<admission::Match>());
        let frames = section("transmit");
        assert_eq!(properties(&frames, &[]), keys_of::<transmit::Config>());
        assert_eq!(properties(&frames, class), keys_of::<transmit::Class>());
        assert_eq!(properties(&frames, rule), keys_of::<transmit::Match>());
        let requests = section("requests");
        assert_eq!(properties(&requests, &[]), keys_of::<RequestsConfig>());
        assert_eq!(properties(&requests, class), keys_of::<RequestClassConfig>());
        assert_eq!(properties(&requests, rule), keys_of::<RequestMatch>());
    }

    #[test]
    fn every_key_of_options_is_in_the_schema() {
        let schema = schema().unwrap();
        let keys = |name: &str| properties(&schema["properties"][name], &[]);
        assert!(keys("host").is_superset(&keys_of::<HostOptions>()));
        assert!(keys("gate").is_superset(&keys_of::<GateOptions>()));
        assert!(keys("router").is_superset(&keys_of::<router::RouterSection>()));
    }

    #[test]
    fn keys_have_the_types_of_their_flags() {
        let schema = schema().unwrap();
        let key =
            |section: &str, key: &str| schema["properties"][section]["properties"][key].clone();
        assert_eq!(key("host", "shared")["type"], "boolean");
        assert_eq!(key("host", "frames")["type"], "integer");
        assert_eq!(key("host", "address")["items"]["type"], "string");
        assert_eq!(key("host", "probe")["enum"], json!(["quick", "rfc", "off"]));
        assert_eq!(key("gate", "feedback")["type"], "boolean");
        assert_eq!(key("gate", "receive-quota")["anyOf"][1]["const"], "unlimited");
        assert!(key("dns", "zone")["description"].as_str().unwrap().contains("Zone file"));
        assert_eq!(key("router", "core-cpus")["items"]["type"], "integer");
    }
}
