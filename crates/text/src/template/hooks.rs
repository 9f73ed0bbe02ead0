//! The filters that [`super::program`] puts around operators, and around the engine's own filters:
//! before an operation, whether there is room for what it may make; behind it, what it has made is
//! counted.

use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value, filters};

use super::ledger::{self, hold};
use super::text::{Text, shown_len};

// No template can spell a name with this character.
pub const HOLD: &str = "\u{1}hold";
/// A list of a list's items.
pub const COPY: &str = "\u{1}copy";
/// The sides of a product, the left one first.
pub const FACTOR: &str = "\u{1}factor";
pub const TIMES: &str = "\u{1}times";
/// Hook of a value that will be shown.
pub const SHOWN: &str = "\u{1}shown";
/// Hook of a value that will be compared.
pub const WEIGH: &str = "\u{1}weigh";
/// Hook of a string that will be split into characters.
pub const CHARACTERS: &str = "\u{1}characters";
/// Hook of a value that an attribute is set to.
pub const ATTRIBUTE: &str = "\u{1}attribute";
/// Hook of a macro's definition, with the number of names that it mentions.
pub const CLOSURE: &str = "\u{1}closure";

/// A character of a string, or an item, in a list, and once more where it is sorted.
const ITEM_BYTES: usize = 64;
/// Most bytes of a character that is escaped or changes its case.
const WIDEST: usize = 6;

pub fn register(env: &mut Environment<'_>) {
    env.add_filter(HOLD, |value: Value| hold(value));
    env.add_filter(COPY, copy);
    env.add_filter(FACTOR, |value: Value| {
        ledger::push_factor(value.clone());
        value
    });
    env.add_filter(TIMES, times);
    env.add_filter(SHOWN, |value: Value| shown_len(&value).map(|_| value));
    env.add_filter(WEIGH, |value: Value| weigh(&value).map(|()| value));
    env.add_filter(CHARACTERS, |value: Value| room_for_characters(&value).map(|()| value));
    env.add_filter(ATTRIBUTE, attribute);
    env.add_filter(CLOSURE, |names: usize| ledger::pin(512 + 128 * names).map(|()| ""));
    for (name, growth, filter) in growths() {
        let call = move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            growth.check(&args)?;
            hold(filter.call(state, &args)?)
        };
        env.add_filter(name, call);
    }
}

/// How much an operation's result may be beyond its operands.
#[derive(Clone, Copy)]
enum Growth {
    /// No more than what is there.
    Same,
    /// Its argument is shown, or changed character by character.
    Shown,
    /// It goes through the items, or characters, and makes a list.
    Items,
    /// The same, and it is told how many to put into one.
    Counted,
    /// Its argument is reversed, string or list.
    Turned,
    /// The same, and it compares them.
    Compared,
    Replaced,
    Joined,
    Formatted,
}

/// The engine's own filters, but for those that [`super`] has in their place.
fn growths() -> Vec<(&'static str, Growth, Value)> {
    use Growth::*;
    vec![
        ("abs", Same, Value::from_function(filters::abs)),
        ("attr", Same, Value::from_function(filters::attr)),
        ("bool", Same, Value::from_function(filters::bool)),
        ("default", Same, Value::from_function(filters::default)),
        ("d", Same, Value::from_function(filters::default)),
        ("first", Same, Value::from_function(filters::first)),
        ("float", Shown, Value::from_function(filters::float)),
        ("int", Shown, Value::from_function(filters::int)),
        ("last", Same, Value::from_function(filters::last)),
        ("length", Same, Value::from_function(filters::length)),
        ("count", Same, Value::from_function(filters::length)),
        ("round", Same, Value::from_function(filters::round)),
        ("capitalize", Shown, Value::from_function(filters::capitalize)),
        ("e", Shown, Value::from_function(filters::escape)),
        ("escape", Shown, Value::from_function(filters::escape)),
        ("lower", Shown, Value::from_function(filters::lower)),
        ("safe", Shown, Value::from_function(filters::safe)),
        ("title", Shown, Value::from_function(filters::title)),
        ("trim", Shown, Value::from_function(filters::trim)),
        ("upper", Shown, Value::from_function(filters::upper)),
        ("batch", Counted, Value::from_function(filters::batch)),
        ("chain", Items, Value::from_function(filters::chain)),
        ("lines", Items, Value::from_function(filters::lines)),
        ("list", Items, Value::from_function(filters::list)),
        ("map", Items, Value::from_function(filters::map)),
        ("reject", Compared, Value::from_function(filters::reject)),
        ("rejectattr", Compared, Value::from_function(filters::rejectattr)),
        ("reverse", Turned, Value::from_function(filters::reverse)),
        ("select", Compared, Value::from_function(filters::select)),
        ("selectattr", Compared, Value::from_function(filters::selectattr)),
        ("slice", Counted, Value::from_function(filters::slice)),
        ("split", Items, Value::from_function(filters::split)),
        ("zip", Items, Value::from_function(filters::zip)),
        ("dictsort", Compared, Value::from_function(filters::dictsort)),
        ("groupby", Compared, Value::from_function(filters::groupby)),
        ("max", Compared, Value::from_function(filters::max)),
        ("min", Compared, Value::from_function(filters::min)),
        ("sort", Compared, Value::from_function(filters::sort)),
        ("unique", Compared, Value::from_function(filters::unique)),
        ("replace", Replaced, Value::from_function(filters::replace)),
        ("join", Joined, Value::from_function(filters::join)),
        ("sum", Joined, Value::from_function(filters::sum)),
        ("format", Formatted, Value::from_function(filters::format)),
    ]
}

impl Growth {
    fn check(self, args: &[Value]) -> Result<(), Error> {
        match self {
            Growth::Same => Ok(()),
            Growth::Shown => {
                let mut len = 0;
                for arg in args {
                    len += shown_len(arg)?;
                }
                room_for_text(len.saturating_mul(WIDEST))
            }
            Growth::Items => args.iter().try_for_each(room_for_items),
            Growth::Counted => {
                args.iter().try_for_each(room_for_items)?;
                args.iter().try_for_each(|arg| room_for(arg.as_usize().unwrap_or(0)))
            }
            Growth::Turned => args.iter().try_for_each(room_for_characters),
            Growth::Compared => {
                args.iter().try_for_each(room_for_items)?;
                args.iter().try_for_each(weigh)
            }
            Growth::Replaced => match args {
                [text, from, to, ..] => {
                    let [text, from, to] = [text, from, to].map(shown);
                    room_for_replaced(&text?, &from?, &to?, usize::MAX)
                }
                _ => Ok(()),
            },
            Growth::Joined => match args {
                [items, others @ ..] => {
                    let mut between = 0;
                    for other in others {
                        between += shown_len(other)?;
                    }
                    room_for_joined(items, between)
                }
                _ => Ok(()),
            },
            Growth::Formatted => match args {
                [format, args @ ..] => room_for_formatted(format.as_str().unwrap_or_default(), args),
                _ => Ok(()),
            },
        }
    }
}

fn room_for_text(bytes: usize) -> Result<(), Error> {
    ledger::spend(bytes)?;
    ledger::make_room(bytes)
}

fn room_for(items: usize) -> Result<(), Error> {
    ledger::make_room(items.saturating_mul(ITEM_BYTES))
}

fn room_for_items(value: &Value) -> Result<(), Error> {
    let items = value.as_str().map(str::len).or_else(|| value.len()).unwrap_or(0);
    ledger::spend(items)?;
    // A short result is not worth a search for dead values.
    if items > 64 { room_for(items) } else { Ok(()) }
}

/// For a text that is taken apart into characters and put together again, or a list's items.
fn room_for_characters(value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => room_for_text(text.len().saturating_mul(8)),
        None => room_for_items(value),
    }
}

/// For the parts of a text: each a value, and all of the text once more.
pub fn room_for_parts(parts: usize, text: &str) -> Result<(), Error> {
    ledger::spend(text.len())?;
    ledger::make_room(parts.saturating_mul(2 * ITEM_BYTES).saturating_add(text.len()))
}

/// For a text that is changed character by character.
pub fn room_for_changed(text: &str) -> Result<(), Error> {
    room_for_text(text.len().saturating_mul(WIDEST))
}

pub fn room_for_replaced(text: &str, from: &str, to: &str, most: usize) -> Result<(), Error> {
    ledger::spend(text.len())?;
    let found = text.matches(from).take(most).count();
    room_for_text(text.len().saturating_add(found.saturating_mul(to.len())).saturating_mul(2))
}

fn room_for_joined(items: &Value, between: usize) -> Result<(), Error> {
    let mut len = 0_usize;
    for item in items.try_iter()? {
        len = len.saturating_add(shown_len(&item)?).saturating_add(between);
        ledger::spend(1)?;
        ledger::make_room(len.saturating_mul(2))?;
    }
    ledger::spend(len)
}

/// Each place that something is put into takes what is shown, or the width that the format or an
/// argument states.
pub fn room_for_formatted(format: &str, args: &[Value]) -> Result<(), Error> {
    let places = format.matches(['%', '{']).count();
    let mut widest = 0_usize;
    for number in format.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty()) {
        widest = widest.max(number.parse().unwrap_or(usize::MAX));
    }
    // A width may be an argument too.
    let takes_widths = format.contains('*') || format.contains(":{") || format.contains(".{");
    for arg in args {
        widest = widest.max(shown_len(arg)?);
        if takes_widths {
            let width = arg.as_i64().map_or(0, |width| usize::try_from(width.unsigned_abs()).unwrap_or(usize::MAX));
            widest = widest.max(width);
        }
    }
    let bytes = places.saturating_mul(widest.saturating_mul(WIDEST).saturating_add(64)).saturating_add(format.len());
    room_for_text(bytes)
}

fn copy(value: Value) -> Result<Value, Error> {
    room_for_items(&value)?;
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable | ValueKind::String | ValueKind::Map => {
            let items = value.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
            hold(Value::from(items))
        }
        _ => Ok(value),
    }
}

/// The right side of a product: one of the two may be a string or a list, and the other says how
/// often.
fn times(right: Value) -> Result<Value, Error> {
    if let Some(left) = ledger::pop_factor() {
        for (value, number) in [(&left, &right), (&right, &left)] {
            let Some(number) = number.as_usize() else { continue };
            match value.as_str() {
                Some(text) => room_for_text(text.len().saturating_mul(number).saturating_mul(2))?,
                None => room_for(value.len().unwrap_or(0).saturating_mul(number))?,
            }
        }
    }
    Ok(right)
}

fn attribute(value: Value) -> Result<Value, Error> {
    match ledger::is_namespace(&value) {
        true => {
            let detail = "a namespace cannot be part of another value";
            Err(Error::new(minijinja::ErrorKind::InvalidOperation, detail))
        }
        false => Ok(value),
    }
}

/// Work of comparing one value, in bytes of a string that take as long.
const VALUE_WORK: usize = 32;

/// Counts everything in a value, as often as it occurs: a comparison may take as long.
fn weigh(value: &Value) -> Result<(), Error> {
    if let Some(text) = value.as_str() {
        return ledger::spend(text.len());
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()? {
                ledger::spend(VALUE_WORK)?;
                weigh(&item)?;
            }
        }
        ValueKind::Map => {
            for key in value.try_iter()? {
                ledger::spend(2 * VALUE_WORK)?;
                weigh(&key)?;
                weigh(&value.get_item(&key)?)?;
            }
        }
        _ => {}
    }
    Ok(())
}

/// The string that a value is shown as.
fn shown(value: &Value) -> Result<String, Error> {
    let mut text = Text::default();
    match value.as_str() {
        Some(value) => text.push(value)?,
        None => text.push_fmt(format_args!("{value}"))?,
    }
    Ok(text.into_string())
}
