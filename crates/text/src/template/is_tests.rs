//! The `is ...` tests whose answer differs between Jinja and the template engine: in Python a
//! string and a dict are sequences, and a bool is a number.

use minijinja::value::ValueKind;
use minijinja::{Environment, Value};

pub fn register(env: &mut Environment<'_>) {
    env.add_test("sequence", |value: &Value| {
        use ValueKind::{Bytes, Iterable, Map, Seq, String, Undefined};
        matches!(value.kind(), Seq | Iterable | Map | String | Bytes | Undefined)
    });
    env.add_test("iterable", |value: &Value| {
        use ValueKind::{Bytes, Iterable, Map, Seq, String, Undefined};
        matches!(value.kind(), Seq | Iterable | Map | String | Bytes | Undefined)
    });
    env.add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
    env.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
}
