//! Python's methods on strings, lists and dicts, as templates call them.
//!
//! The engine's own companion crate covers the common ones; strings are done here because templates
//! lean on exact behaviour (which characters `strip` removes, what `split` does with a limit).
//! Methods that would change a list or a dict are refused, as in the sandbox transformers uses.

use minijinja::value::{Kwargs, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

use super::hooks::{room_for_changed, room_for_formatted, room_for_parts, room_for_replaced};
use super::python;
use super::text::Text;

const MUTATING: [&str; 12] = [
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "reverse",
    "setdefault",
    "sort",
    "update",
    "__setitem__",
];

/// Methods that give the text again, changed character by character.
const CHANGING: [&str; 6] = ["swapcase", "casefold", "title", "capitalize", "upper", "lower"];

pub fn call(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            if CHANGING.contains(&method) {
                room_for_changed(text)?;
            }
            match string_method(text, method, args) {
                Some(result) => result,
                None if method == "format" => {
                    room_for_formatted(text, args)?;
                    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
                }
                None => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
            }
        }
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable if MUTATING.contains(&method) => {
            let kind = value.kind();
            Err(invalid(format!("{method} would change a {kind}, which templates may not do")))
        }
        ValueKind::Seq | ValueKind::Iterable if method == "index" => {
            let (wanted,): (&Value,) = from_args(args)?;
            let found = value.try_iter()?.position(|item| item == *wanted);
            found.map(Value::from).ok_or_else(|| invalid("the value is not in the list".into()))
        }
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable if method == "copy" => Ok(value.clone()),
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
    }
}

/// Jinja's `items` filter: pairs of a mapping, nothing of an undefined value, an error for the
/// rest.
pub fn items_filter(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(Value::from(Vec::<Value>::new())),
        ValueKind::Map => {
            let pair = |key: Value| value.get_item(&key).map(|item| Value::from(Tuple::from([key.clone(), item])));
            Ok(Value::from(value.try_iter()?.map(pair).collect::<Result<Vec<_>, _>>()?))
        }
        _ => Err(invalid("can only get item pairs from a mapping".into())),
    }
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&character)
}

/// `None` when the method is not one of those here.
fn string_method(text: &str, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    Some(match method {
        "strip" | "lstrip" | "rstrip" => strip(text, method, args),
        "split" | "rsplit" => split(text, method, args),
        "splitlines" => splitlines(text, args),
        "partition" | "rpartition" => partition(text, method, args),
        "removeprefix" | "removesuffix" => from_args(args).map(|(affix,): (&str,)| {
            let found = if method == "removeprefix" { text.strip_prefix(affix) } else { text.strip_suffix(affix) };
            Value::from(found.unwrap_or(text))
        }),
        "startswith" | "endswith" => starts_or_ends(text, method, args),
        "find" | "rfind" | "index" | "rindex" | "count" => search(text, method, args),
        "ljust" | "rjust" | "center" | "zfill" => pad(text, method, args),
        "join" => join(text, args),
        "replace" => replace(text, args),
        "swapcase" => no_arguments(args, || text.chars().flat_map(swap_case).collect::<String>()),
        "casefold" => no_arguments(args, || text.to_lowercase()),
        "title" => no_arguments(args, || title(text)),
        "capitalize" => no_arguments(args, || {
            let mut rest = text.chars();
            let first = rest.next().map(|c| c.to_uppercase().collect::<String>()).unwrap_or_default();
            first + &rest.as_str().to_lowercase()
        }),
        "isspace" => no_arguments(args, || !text.is_empty() && text.chars().all(is_space)),
        "isdecimal" => no_arguments(args, || !text.is_empty() && text.chars().all(|c| c.is_ascii_digit())),
        _ => return None,
    })
}

fn no_arguments<T: Into<Value>>(args: &[Value], result: impl FnOnce() -> T) -> Result<Value, Error> {
    from_args(args).map(|()| result().into())
}

fn strip(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (chars,): (Option<&str>,) = from_args(args)?;
    let drop = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    Ok(Value::from(match method {
        "lstrip" => text.trim_start_matches(drop),
        "rstrip" => text.trim_end_matches(drop),
        _ => text.trim_matches(drop),
    }))
}

fn split(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, limit, named): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
    let named_separator: Option<String> = named.get("sep")?;
    let separator = separator.or(named_separator.as_deref());
    let limit = limit.or(named.get("maxsplit")?).unwrap_or(-1);
    named.assert_all_used()?;
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let from_right = method == "rsplit";
    let most_parts = match separator {
        Some("") => 0,
        Some(separator) => text.matches(separator).count(),
        None => text.split(is_space).count(),
    };
    room_for_parts(most_parts.min(limit).saturating_add(1), text)?;
    let parts: Vec<&str> = match separator {
        Some("") => return Err(invalid("split: empty separator".into())),
        Some(separator) if from_right => {
            let mut parts: Vec<_> = text.rsplitn(limit.saturating_add(1), separator).collect();
            parts.reverse();
            parts
        }
        Some(separator) => text.splitn(limit.saturating_add(1), separator).collect(),
        None if from_right => split_spaces_right(text, limit),
        None => split_spaces(text, limit),
    };
    Ok(Value::from(parts.into_iter().map(Value::from).collect::<Vec<_>>()))
}

fn split_spaces(text: &str, limit: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        if parts.len() == limit {
            parts.push(rest);
            break;
        }
        let end = rest.find(is_space).unwrap_or(rest.len());
        parts.push(&rest[..end]);
        rest = rest[end..].trim_start_matches(is_space);
    }
    parts
}

fn split_spaces_right(text: &str, limit: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_end_matches(is_space);
    while !rest.is_empty() {
        if parts.len() == limit {
            parts.push(rest);
            break;
        }
        let start = rest.char_indices().rev().find(|(_, c)| is_space(*c)).map_or(0, |(at, c)| at + c.len_utf8());
        parts.push(&rest[start..]);
        rest = rest[..start].trim_end_matches(is_space);
    }
    parts.reverse();
    parts
}

fn ends_line(c: char) -> bool {
    matches!(c, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

fn splitlines(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (keep, named): (Option<bool>, Kwargs) = from_args(args)?;
    let keep = keep.or(named.get("keepends")?).unwrap_or(false);
    named.assert_all_used()?;
    room_for_parts(text.matches(ends_line).count() + 1, text)?;
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some((at, end)) = rest.char_indices().find(|(_, c)| ends_line(*c)) {
        let width = if rest[at..].starts_with("\r\n") { 2 } else { end.len_utf8() };
        lines.push(Value::from(&rest[..if keep { at + width } else { at }]));
        rest = &rest[at + width..];
    }
    if !rest.is_empty() {
        lines.push(Value::from(rest));
    }
    Ok(Value::from(lines))
}

fn partition(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator,): (&str,) = from_args(args)?;
    if separator.is_empty() {
        return Err(invalid("partition: empty separator".into()));
    }
    let parts = if method == "partition" {
        text.split_once(separator).map_or([text, "", ""], |(head, tail)| [head, separator, tail])
    } else {
        text.rsplit_once(separator).map_or(["", "", text], |(head, tail)| [head, separator, tail])
    };
    Ok(Value::from(Tuple::from(parts.map(Value::from))))
}

/// The part of `text` between two character positions, negative ones counted from the end; `None`
/// past the end.
fn window(text: &str, start: Option<i64>, end: Option<i64>) -> Option<(usize, &str)> {
    if start.is_none() && end.is_none() {
        return Some((0, text));
    }
    let length = text.chars().count() as i64;
    let place = |at: i64| if at < 0 { (at + length).max(0) } else { at };
    let (start, end) = (place(start.unwrap_or(0)), place(end.unwrap_or(length)).min(length));
    if start > length || start > end {
        return None;
    }
    let byte = |at: i64| text.char_indices().nth(at as usize).map_or(text.len(), |(byte, _)| byte);
    Some((start as usize, &text[byte(start)..byte(end)]))
}

fn starts_or_ends(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (affix, start, end): (&Value, Option<i64>, Option<i64>) = from_args(args)?;
    let Some((_, text)) = window(text, start, end) else {
        return Ok(Value::from(false));
    };
    let matches = |affix: &str| if method == "startswith" { text.starts_with(affix) } else { text.ends_with(affix) };
    if let Some(affix) = affix.as_str() {
        return Ok(Value::from(matches(affix)));
    }
    if !affix.is_tuple() {
        return Err(invalid(format!("{method} takes a string or a tuple of strings, not a {}", affix.kind())));
    }
    Ok(Value::from(affix.try_iter()?.any(|affix| affix.as_str().is_some_and(&matches))))
}

fn search(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (wanted, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
    let found = window(text, start, end);
    if method == "count" {
        return Ok(Value::from(found.map_or(0, |(_, text)| text.matches(wanted).count())));
    }
    let found = found.and_then(|(offset, text)| {
        let at = if method.starts_with('r') { text.rfind(wanted) } else { text.find(wanted) };
        at.map(|at| offset + text[..at].chars().count())
    });
    match found {
        Some(at) => Ok(Value::from(at)),
        None if method.ends_with("find") => Ok(Value::from(-1)),
        None => Err(invalid("substring not found".into())),
    }
}

fn pad(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    const MAX_WIDTH: i64 = 1 << 16;
    let (width, fill): (i64, Option<&str>) = from_args(args)?;
    let fill = fill.unwrap_or(if method == "zfill" { "0" } else { " " });
    if fill.chars().count() != 1 || width > MAX_WIDTH {
        return Err(invalid(format!("{method} takes a width up to {MAX_WIDTH} and one fill character")));
    }
    let missing = usize::try_from(width).unwrap_or(0).saturating_sub(text.chars().count());
    let fill = |count: usize| fill.repeat(count);
    Ok(Value::from(match method {
        "ljust" => text.to_string() + &fill(missing),
        "rjust" => fill(missing) + text,
        "zfill" => {
            let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
            text[..text.len() - digits.len()].to_string() + &fill(missing) + digits
        }
        _ => {
            let left = missing / 2 + (missing & width as usize & 1);
            fill(left) + text + &fill(missing - left)
        }
    }))
}

fn join(separator: &str, args: &[Value]) -> Result<Value, Error> {
    let (items,): (&Value,) = from_args(args)?;
    let mut out = Text::default();
    for (index, item) in items.try_iter()?.enumerate() {
        if index > 0 {
            out.push(separator)?;
        }
        match item.as_str() {
            Some(item) => out.push(item)?,
            None => {
                let item = python::to_str(&item)?;
                return Err(invalid(format!("join takes strings, but item {index} is {item}")));
            }
        }
    }
    Ok(Value::from(out.into_string()))
}

/// `count` below zero, as none, is all there are.
fn replace(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (from, to, count): (&str, &str, Option<i32>) = from_args(args)?;
    let most = count.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
    room_for_replaced(text, from, to, most)?;
    Ok(Value::from(text.replacen(from, to, most)))
}

fn swap_case(character: char) -> Vec<char> {
    if character.is_uppercase() { character.to_lowercase().collect() } else { character.to_uppercase().collect() }
}

fn title(text: &str) -> String {
    let mut out = String::new();
    let mut inside_word = false;
    for character in text.chars() {
        if inside_word {
            out.extend(character.to_lowercase());
        } else {
            out.extend(character.to_uppercase());
        }
        inside_word = character.is_alphabetic();
    }
    out
}

#[cfg(test)]
mod tests {
    use crate::template::{ChatRender, ChatTemplate, SpecialTokens};

    /// Expectations are what Python 3.11 prints for the same expressions.
    #[test]
    fn string_methods_answer_as_python_does() {
        let check = |expression: &str, expect: &str| {
            let template = ChatTemplate::new(&format!("{{{{ {expression} }}}}"), SpecialTokens::default()).unwrap();
            assert_eq!(template.render(&ChatRender::default()).unwrap(), expect, "{expression}");
        };
        check("'  a b '.strip()", "a b");
        check("'xxaxx'.lstrip('x')", "axx");
        check("' a  b c '.split()", "['a', 'b', 'c']");
        check("' a  b c '.split(None, 1)", "['a', 'b c ']");
        check("' a  b c '.rsplit(maxsplit=1)", "[' a  b', 'c']");
        check("'a,b,c'.split(',', 1)", "['a', 'b,c']");
        check("'a,b,c'.rsplit(',', 1)", "['a,b', 'c']");
        check("'a</think>b</think>c'.split('</think>')[-1]", "c");
        check("'a=b=c'.partition('=')", "('a', '=', 'b=c')");
        check("'a=b=c'.rpartition('=')", "('a=b', '=', 'c')");
        check("'abc'.partition('=')", "('abc', '', '')");
        check("'prefix-x'.removeprefix('prefix-')", "x");
        check("'x.json'.removesuffix('.json')", "x");
        check("'a\\nb\\r\\nc\\n'.splitlines()", "['a', 'b', 'c']");
        check("'a\\nb'.splitlines(true)", r"['a\n', 'b']");
        check("'héllo'.find('l')", "2");
        check("'héllo'.rfind('l')", "3");
        check("'héllo'.find('z')", "-1");
        check("'héllo'.index('o')", "4");
        check("'abcabc'.find('a', 1)", "3");
        check("'abcabc'.count('bc')", "2");
        check("'abc'.startswith(('x', 'ab'))", "True");
        check("'abc'.endswith('c')", "True");
        check("'abc'.startswith('b', 1)", "True");
        check("'7'.zfill(3) ~ '-7'.zfill(4)", "007-007");
        check("'ab'.center(5, '*')", "**ab*");
        check("'ab'.ljust(4, '.') ~ 'ab'.rjust(4)", "ab..  ab");
        check("', '.join(['a', 'b'])", "a, b");
        check("\"they're bill's\".title()", "They'Re Bill'S");
        check("'hELLO wORLD'.capitalize()", "Hello world");
        check("'aBc'.swapcase()", "AbC");
        check("'a-b'.replace('-', '+')", "a+b");
        check("{'a': 1}.get('b', 'none')", "none");
        check("['a', 'b'].index('b')", "1");
        check("{'a': 1, 'b': 2}.items()|list", "[('a', 1), ('b', 2)]");
    }

    #[test]
    fn lists_and_dicts_cannot_be_changed() {
        for expression in ["[1].append(2)", "{'a': 1}.update({})", "{'a': 1}.pop('a')"] {
            let template = ChatTemplate::new(&format!("{{{{ {expression} }}}}"), SpecialTokens::default()).unwrap();
            let error = template.render(&ChatRender::default()).unwrap_err().to_string();
            assert!(error.contains("may not do"), "{error}");
        }
    }
}
