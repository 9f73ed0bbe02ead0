//! Hostile requests for every route, made from tables: each kind of harm, in each field that takes
//! its kind of value.
//!
//! A case says what must become of it. The tables have an idea of their own of what is valid,
//! written down beside the server's, so that a check that goes missing there is missed here.

mod bodies;
pub mod catalogue;
pub mod client;
mod framing;
mod numbers;
mod routes;
mod texts;
mod tokens;

pub use routes::{ROUTES, Route};

/// Sent along wherever there is room for a text: no refusal may repeat it.
pub const MARKER: &str = "zqmarkerqz";
pub const KEY: &str = "0123456789abcdef0123456789abcdef";

pub struct Case {
    pub name: String,
    pub route: &'static Route,
    /// All that goes over the wire.
    pub request: Vec<u8>,
    pub expect: Expect,
    pub ending: Ending,
}

/// Use of a case's connection after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The next request, if the answer leaves it open.
    Reusable,
    /// Nothing: it has a connection of its own.
    Alone,
    /// The client says at once that no more will come.
    HalfClosed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    Taken,
    /// Accepted, as a prompt of this many tokens: nothing in it was interpreted.
    Tokens(usize),
    /// Refused with this status; a 400 names the field, or nothing where the body as a whole is at
    /// fault.
    Refused(u16, &'static str),
    /// Either: what matters is that the answer is sound.
    TakenOrRefused(u16, &'static str),
    /// Any sound answer or refusal.
    Sound,
    /// No request at all: one of these statuses, perhaps without a word, or (0) a connection that
    /// ends.
    Unsound(&'static [u16]),
}

impl Case {
    /// A request with this body, otherwise as it should be.
    fn body(route: &'static Route, name: impl Into<String>, body: impl AsRef<[u8]>, expect: Expect) -> Self {
        let head = head(route, "");
        Self::raw(
            route,
            name,
            [head_with_length(&head, body.as_ref().len()).as_bytes(), body.as_ref()].concat(),
            expect,
        )
    }

    fn raw(route: &'static Route, name: impl Into<String>, request: impl Into<Vec<u8>>, expect: Expect) -> Self {
        Self { name: name.into(), route, request: request.into(), expect, ending: Ending::Reusable }
    }

    fn ending(self, ending: Ending) -> Self {
        Self { ending, ..self }
    }

    /// Whether refusals are written as Anthropic's clients read them: the path decides.
    pub fn is_anthropic(&self) -> bool {
        self.style_path().starts_with("/v1/messages")
    }

    /// The path as the request line has it, without a host.
    fn style_path(&self) -> String {
        let line = String::from_utf8_lossy(&self.request);
        let target = line.split(' ').nth(1).unwrap_or_default();
        match target.strip_prefix("http://") {
            Some(rest) => rest.split_once('/').map_or(String::new(), |(_, path)| format!("/{path}")),
            None => target.to_owned(),
        }
    }

    /// A request that is fine but for one field, given as JSON text.
    fn field(route: &'static Route, field: &str, json: &str, expect: Expect) -> Self {
        let shown: String = json.chars().take(40).collect();
        Self::body(route, format!("{field} = {shown}"), route.with(field, json), expect)
    }
}

/// Request line and fields up to where a length belongs.
fn head(route: &Route, more: &str) -> String {
    let path = route.path;
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n{more}"
    )
}

fn head_with_length(head: &str, length: usize) -> String {
    format!("{head}content-length: {length}\r\n\r\n")
}

/// Every case for a route.
pub fn cases(route: &'static Route) -> Vec<Case> {
    let mut cases = Vec::new();
    numbers::add(route, &mut cases);
    tokens::add(route, &mut cases);
    texts::add(route, &mut cases);
    bodies::add(route, &mut cases);
    framing::add(route, &mut cases);
    cases
}
