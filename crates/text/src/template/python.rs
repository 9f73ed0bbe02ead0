//! Values as Python shows them: what `str()` and `repr()` print, where the template engine would
//! print its own way.

use minijinja::value::ValueKind;
use minijinja::{Error, Value};
use serde_json::Value as Json;

use super::text::Text;

/// How deep a value is shown, and written as JSON: as deep as JSON readers read. A template can
/// nest values until showing them would use up the stack.
pub const MAX_DEPTH: usize = 128;

/// A template value from JSON, keys in the order given.
pub fn from_json(value: &Json) -> Value {
    match value {
        Json::Null => Value::from(()),
        Json::Bool(flag) => Value::from(*flag),
        Json::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(number), ..) => Value::from(number),
            (_, Some(number), _) => Value::from(number),
            (_, _, number) => Value::from(number.unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => Value::from(items.iter().map(from_json).collect::<Vec<_>>()),
        Json::Object(map) => Value::from_pairs(map.iter().map(|(key, value)| (key.as_str(), from_json(value)))),
    }
}

/// The float inside, if the value is a float and not an integer.
pub fn as_float(value: &Value) -> Option<f64> {
    if value.kind() == ValueKind::Number && !value.is_integer() { f64::try_from(value.clone()).ok() } else { None }
}

/// `str(value)`, as far as there is room for it.
pub fn to_str(value: &Value) -> Result<String, Error> {
    let mut out = Text::default();
    match value.as_str() {
        Some(text) => out.push(text)?,
        None if value.is_undefined() => {}
        None => write_repr(&mut out, value, 0)?,
    }
    Ok(out.into_string())
}

fn write_repr(out: &mut Text, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return out.push("...");
    }
    if let Some(number) = as_float(value) {
        return out.push(&float(number));
    }
    match value.kind() {
        ValueKind::Undefined => out.push("Undefined"),
        ValueKind::Seq | ValueKind::Iterable => write_sequence(out, value, depth),
        ValueKind::Map => {
            out.push("{")?;
            let keys = value.try_iter().into_iter().flatten();
            for (index, key) in keys.enumerate() {
                if index > 0 {
                    out.push(", ")?;
                }
                write_repr(out, &key, depth + 1)?;
                out.push(": ")?;
                write_repr(out, &value.get_item(&key).unwrap_or_default(), depth + 1)?;
            }
            out.push("}")
        }
        // The engine's debug form of a string is Python's repr.
        ValueKind::String => out.push_fmt(format_args!("{value:?}")),
        _ => out.push_fmt(format_args!("{value}")),
    }
}

fn write_sequence(out: &mut Text, value: &Value, depth: usize) -> Result<(), Error> {
    let (open, close) = if value.is_tuple() { ("(", ")") } else { ("[", "]") };
    out.push(open)?;
    let mut count = 0;
    for item in value.try_iter().into_iter().flatten() {
        if count > 0 {
            out.push(", ")?;
        }
        write_repr(out, &item, depth + 1)?;
        count += 1;
    }
    if count == 1 && value.is_tuple() {
        out.push(",")?;
    }
    out.push(close)
}

/// A float as Python prints it: the shortest digits that read back, exponents below 1e-4 and from
/// 1e16.
pub fn float(number: f64) -> String {
    if number.is_nan() {
        return "nan".into();
    }
    if number.is_infinite() {
        return if number < 0.0 { "-inf" } else { "inf" }.into();
    }
    let shortest = format!("{number:e}");
    let (digits, exponent) = shortest.split_once('e').expect("the exponent form has an e");
    let exponent: i32 = exponent.parse().expect("the exponent form ends in an integer");
    if (-4..16).contains(&exponent) || number == 0.0 {
        let plain = number.to_string();
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_in_python() {
        let check = |number: f64, expect: &str| assert_eq!(float(number), expect);
        check(1.0, "1.0");
        check(-0.0, "-0.0");
        check(0.1, "0.1");
        check(0.0001, "0.0001");
        check(0.00001, "1e-05");
        check(1.5e22, "1.5e+22");
        check(1e15, "1000000000000000.0");
        check(1e16, "1e+16");
        check(123456789.125, "123456789.125");
        check(-1e-7, "-1e-07");
        check(5e-324, "5e-324");
    }

    #[test]
    fn containers_print_as_in_python() {
        let value: Json = serde_json::json!({"a": [1, 1.0, true, null, "it's"], "b": {"c": "x\ny"}});
        assert_eq!(to_str(&from_json(&value)).unwrap(), r#"{'a': [1, 1.0, True, None, "it's"], 'b': {'c': 'x\ny'}}"#);
        assert_eq!(to_str(&Value::UNDEFINED).unwrap(), "");
    }
}
