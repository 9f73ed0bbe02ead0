//! All descriptions of `/openapi.json` as one committed list, so that they are read as a list.
//!
//! A change of a description changes `descriptions.txt` too:
//! `FOLIO_WRITE_OPENAPI=1 cargo test -p folio-server descriptions` writes it anew.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::tests::app;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/routes/openapi/descriptions.txt");

/// Parts of a path through the document that say nothing to a reader.
const SILENT: [&str; 9] =
    ["paths", "components", "schemas", "properties", "items", "anyOf", "schema", "parameters", "responses"];

#[test]
fn descriptions_are_those_of_the_snapshot() {
    let app = app();
    let mut places = BTreeMap::new();
    collect(&super::document(app.service().expect("set"), true), String::new(), &mut places);
    let mut lines: Vec<String> = places.into_iter().map(|(text, places)| line(&text, &places)).collect();
    lines.sort_unstable();
    let text = lines.concat();
    if std::env::var_os("FOLIO_WRITE_OPENAPI").is_some() {
        std::fs::write(FILE, &text).expect("the tree can be written");
    }
    let committed = std::fs::read_to_string(FILE).expect("it is committed");
    let changed = committed.lines().zip(text.lines()).find(|(committed, now)| committed != now);
    assert!(
        committed == text,
        "descriptions have changed, first {changed:?}; read them, and commit what \
         FOLIO_WRITE_OPENAPI=1 cargo test -p folio-server descriptions writes"
    );
}

/// A description behind the first of its places.
fn line(text: &str, places: &BTreeSet<String>) -> String {
    let first = places.first().expect("it stands somewhere");
    match places.len() - 1 {
        0 => format!("{first}: {text}\n"),
        others => format!("{first} (+{others}): {text}\n"),
    }
}

/// The descriptions and summaries below `value`, with their places.
fn collect(value: &Value, place: String, places: &mut BTreeMap<String, BTreeSet<String>>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value.as_str() {
                    Some(text) if name == "description" || name == "summary" => {
                        places.entry(text.to_owned()).or_default().insert(place.trim_start().to_owned());
                    }
                    _ if SILENT.contains(&name.as_str()) => collect(value, place.clone(), places),
                    _ => collect(value, format!("{place} {name}"), places),
                }
            }
        }
        Value::Array(items) => {
            for item in items {
                let name = item["name"].as_str().map(|name| format!(" {name}")).unwrap_or_default();
                collect(item, format!("{place}{name}"), places);
            }
        }
        _ => {}
    }
}
