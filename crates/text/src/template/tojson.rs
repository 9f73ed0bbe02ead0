//! The `tojson` filter as transformers defines it: Python's `json.dumps`, with no HTML escapes.

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::python::{self, MAX_DEPTH};
use super::text::Text;

struct Style {
    ascii: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

/// `tojson(value, ensure_ascii, indent, separators, sort_keys)`, each by place or by name.
pub fn filter(value: &Value, placed: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    if placed.len() > 4 {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let pick = |place: usize, name: &str| -> Result<Option<Value>, Error> {
        let value = match placed.get(place) {
            Some(value) => Some(value.clone()),
            None => named.get::<Option<Value>>(name)?,
        };
        Ok(value.filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let ascii = pick(0, "ensure_ascii")?.is_some_and(|value| value.is_true());
    let indent = pick(1, "indent")?.map(indent_text).transpose()?;
    let separators = pick(2, "separators")?;
    let sort_keys = pick(3, "sort_keys")?.is_some_and(|value| value.is_true());
    named.assert_all_used()?;
    let (item_separator, key_separator) = match separators {
        Some(pair) => {
            let part = |index| python::to_str(&pair.get_item_by_index(index)?);
            (part(0)?, part(1)?)
        }
        None if indent.is_some() => (",".into(), ": ".into()),
        None => (", ".into(), ": ".into()),
    };
    let style = Style { ascii, indent, item_separator, key_separator, sort_keys };
    let mut out = Text::default();
    write_value(&mut out, value, &style, 0)?;
    Ok(out.into_string())
}

fn indent_text(indent: Value) -> Result<String, Error> {
    match (indent.as_str(), indent.as_i64()) {
        (Some(text), _) => Ok(text.to_string()),
        (None, Some(count)) => Ok(" ".repeat(count.clamp(0, 64) as usize)),
        _ => Err(Error::new(ErrorKind::InvalidOperation, "tojson: indent must be a number or a string")),
    }
}

fn write_value(out: &mut Text, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson: the value is nested too deeply"));
    }
    if let Some(number) = python::as_float(value) {
        return out.push(&match () {
            () if number.is_nan() => "NaN".to_string(),
            () if number.is_infinite() => if number < 0.0 { "-Infinity" } else { "Infinity" }.to_string(),
            () => python::float(number),
        });
    }
    match value.kind() {
        ValueKind::None => out.push("null"),
        ValueKind::Bool => out.push(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_fmt(format_args!("{value}")),
        ValueKind::String => write_string(out, value.as_str().unwrap_or_default(), style.ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let items = value.try_iter()?.collect::<Vec<_>>();
            write_list(out, ["[", "]"], items.len(), style, depth, |out, index| {
                write_value(out, &items[index], style, depth + 1)
            })
        }
        ValueKind::Map => {
            let mut keys = value.try_iter()?.collect::<Vec<_>>();
            if style.sort_keys {
                keys.sort();
            }
            write_list(out, ["{", "}"], keys.len(), style, depth, |out, index| {
                let key = &keys[index];
                write_key(out, key, style)?;
                out.push(&style.key_separator)?;
                write_value(out, &value.get_item(key)?, style, depth + 1)
            })
        }
        kind => {
            let detail = format!("tojson: a value of type {kind} has no JSON form");
            Err(Error::new(ErrorKind::InvalidOperation, detail))
        }
    }
}

fn write_list(
    out: &mut Text,
    [open, close]: [&str; 2],
    len: usize,
    style: &Style,
    depth: usize,
    mut write_item: impl FnMut(&mut Text, usize) -> Result<(), Error>,
) -> Result<(), Error> {
    let new_line = |out: &mut Text, depth: usize| {
        let Some(indent) = &style.indent else { return Ok(()) };
        out.push("\n")?;
        (0..depth).try_for_each(|_| out.push(indent))
    };
    out.push(open)?;
    for index in 0..len {
        if index > 0 {
            out.push(&style.item_separator)?;
        }
        new_line(out, depth + 1)?;
        write_item(out, index)?;
    }
    if len > 0 {
        new_line(out, depth)?;
    }
    out.push(close)
}

fn write_key(out: &mut Text, key: &Value, style: &Style) -> Result<(), Error> {
    match key.as_str() {
        Some(text) => write_string(out, text, style.ascii),
        None => {
            let mut text = Text::default();
            write_value(&mut text, key, style, MAX_DEPTH)?;
            write_string(out, &text.into_string(), style.ascii)
        }
    }
}

fn write_string(out: &mut Text, text: &str, ascii: bool) -> Result<(), Error> {
    out.push("\"")?;
    // Text that needs no escape is written in one go.
    let mut plain = text;
    while let Some((at, character)) = plain.char_indices().find(|&(_, character)| is_escaped(character, ascii)) {
        out.push(&plain[..at])?;
        plain = &plain[at + character.len_utf8()..];
        match character {
            '"' => out.push("\\\"")?,
            '\\' => out.push("\\\\")?,
            '\n' => out.push("\\n")?,
            '\r' => out.push("\\r")?,
            '\t' => out.push("\\t")?,
            '\u{8}' => out.push("\\b")?,
            '\u{c}' => out.push("\\f")?,
            _ => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    out.push_fmt(format_args!("\\u{unit:04x}"))?;
                }
            }
        }
    }
    out.push(plain)?;
    out.push("\"")
}

fn is_escaped(character: char, ascii: bool) -> bool {
    matches!(character, '"' | '\\' | '\0'..='\u{1f}') || (ascii && character > '~')
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::template::{ChatRender, ChatTemplate, SpecialTokens};

    /// Expectations are `json.dumps` of Python 3.11.
    #[test]
    fn json_is_written_as_python_writes_it() {
        let check = |call: &str, expect: &str| {
            let template = ChatTemplate::new(&format!("{{{{ v|{call} }}}}"), SpecialTokens::default()).unwrap();
            let value = json!({"b": [1, 2.0, "é<\u{1F600}\u{7f}\u{1}"], "a": {}, "c": [], "d": null});
            let extra = [("v".to_string(), value)].into_iter().collect();
            let text = template.render(&ChatRender { extra, ..Default::default() }).unwrap();
            assert_eq!(text, expect, "{call}");
        };
        check("tojson", "{\"b\": [1, 2.0, \"é<😀\u{7f}\\u0001\"], \"a\": {}, \"c\": [], \"d\": null}");
        check(
            "tojson(ensure_ascii=True, sort_keys=true)",
            r#"{"a": {}, "b": [1, 2.0, "\u00e9<\ud83d\ude00\u007f\u0001"], "c": [], "d": null}"#,
        );
        check("tojson(separators=(',', ':'))", "{\"b\":[1,2.0,\"é<😀\u{7f}\\u0001\"],\"a\":{},\"c\":[],\"d\":null}");
        check(
            "tojson(indent=1)",
            "{\n \"b\": [\n  1,\n  2.0,\n  \"é<😀\u{7f}\\u0001\"\n ],\n \"a\": {},\n \"c\": [],\n \"d\": null\n}",
        );
    }
}
