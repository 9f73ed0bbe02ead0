//! Chat templates, rendered as transformers renders them.
//!
//! A template is code that came with a model. It runs in minijinja with no loader, no clock and no
//! environment, under a fuel limit, a recursion limit and an output limit. The dialect is the one
//! `apply_chat_template` sets up: block trimming, loop controls, Python's string methods, a plain
//! `tojson`, `raise_exception`, and `strftime_now` when the caller passes a date. `{% generation
//! %}` marks are dropped: they only matter for training masks.
//!
//! Its memory is bounded too, and so is its work: every operation that can make a value longer asks
//! first and is counted (`program.rs`, `hooks.rs`, `ledger.rs`), so a template that doubles a
//! string without writing it ends with an error.

mod hooks;
mod is_tests;
mod ledger;
mod methods;
mod program;
mod python;
mod source;
mod strftime;
mod text;
mod tojson;

use std::panic::{AssertUnwindSafe, catch_unwind};

use minijinja::value::{Kwargs, Rest};
use minijinja::{AutoEscape, Environment, ErrorKind, Value, machinery, syntax::SyntaxConfig};
use serde_json::{Map, Value as Json};

pub use self::strftime::WallTime;
use self::{ledger::Limits, program::Program, text::Text};
use crate::{Error, Result};

/// Instructions one render may run: hundreds of times what a real template needs for thousands of
/// messages.
const FUEL: u64 = 20_000_000;
/// In minijinja's units, where a macro call counts four: fifty nested macros.
const RECURSION_LIMIT: usize = 200;
/// A prompt may be this much longer than what went into it.
const OUTPUT_FACTOR: usize = 4;
const OUTPUT_SLACK_BYTES: usize = 1 << 20;
/// Captured output is written again: all writes together may be this many times the output.
const EMIT_FACTOR: usize = 4;

/// Bytes that the values of a render may take, as a multiple of its input: a value takes more than
/// its text.
const LIVE_FACTOR: usize = 16;
const LIVE_SLACK_BYTES: usize = 8 << 20;

/// Bytes that its operations may go through, of seconds of work.
const WORK_FACTOR: usize = 512;
const WORK_SLACK_BYTES: usize = 1 << 30;

const TEMPLATE_NAME: &str = "chat";
/// Names that a template's own variables and the arguments of `apply_chat_template` have. A
/// request's extra variables may not take them.
pub const RESERVED: [&str; 8] = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "chat_template",
    "strftime_now",
];

/// The tokens a template may name. One that the tokenizer does not define is undefined in the
/// template too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    pub bos: Option<String>,
    pub eos: Option<String>,
    pub pad: Option<String>,
    pub unk: Option<String>,
}

/// One conversation to render.
#[derive(Clone, Debug, Default)]
pub struct ChatRender {
    /// Each a JSON object with at least `role`.
    pub messages: Vec<Json>,
    pub tools: Option<Json>,
    pub documents: Option<Json>,
    pub add_generation_prompt: bool,
    /// More variables for the template, such as `enable_thinking`.
    pub extra: Map<String, Json>,
    /// The result of `strftime_now`. Without it the function is undefined, and templates use the
    /// date they carry.
    pub now: Option<WallTime>,
}

/// A compiled template; rendering takes `&self` and may go on in many threads.
pub struct ChatTemplate {
    env: Environment<'static>,
    program: Program,
    source_bytes: usize,
}

/// Assumed bytes of a library's object that is not inspected.
const OBJECT_BYTES: usize = 512;

type FilterResult = Result<String, minijinja::Error>;

/// Marks an error as the template's own decision.
#[derive(Debug)]
struct Refused(String);

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

impl ChatTemplate {
    pub fn new(source: &str, special: SpecialTokens) -> Result<Self> {
        let source_bytes = source.len();
        let source = source::prepare(source);
        let mut env = environment()?;
        let named = [
            ("bos_token", special.bos),
            ("eos_token", special.eos),
            ("pad_token", special.pad),
            ("unk_token", special.unk),
        ];
        for (name, token) in named {
            if let Some(token) = token {
                env.add_global(name, token);
            }
        }
        let syntax = syntax()?;
        let program = catch_unwind(AssertUnwindSafe(|| Program::compile(TEMPLATE_NAME, source, syntax)))
            .map_err(|_| Error::TemplateSyntax("the parser panicked".into()))?
            .map_err(|error| Error::TemplateSyntax(describe(&error)))?;
        Ok(ChatTemplate { env, program, source_bytes })
    }

    pub fn render(&self, request: &ChatRender) -> Result<String> {
        let context = context(request)?;
        let given = input_bytes(request) + self.source_bytes;
        let limit = OUTPUT_FACTOR * given + OUTPUT_SLACK_BYTES;
        let limits = Limits {
            live: LIVE_FACTOR * given + LIVE_SLACK_BYTES,
            emitted: EMIT_FACTOR * limit,
            work: WORK_FACTOR * given + WORK_SLACK_BYTES,
        };
        let mut output = String::new();
        let rendered = ledger::run(limits, || {
            catch_unwind(AssertUnwindSafe(|| {
                let Program { instructions, blocks } = &self.program;
                let mut out = machinery::make_string_output(&mut output);
                machinery::eval(&self.env, instructions, context, blocks, &mut out, AutoEscape::None).map(drop)
            }))
        });
        match rendered {
            Err(_) => Err(Error::TemplateRender("the interpreter panicked".into())),
            Ok(Err(error)) => Err(classify(&error, limit)),
            Ok(Ok(())) if output.len() > limit => Err(Error::TemplateOutput { limit }),
            Ok(Ok(())) => Ok(output),
        }
    }
}

fn syntax() -> Result<SyntaxConfig> {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    syntax.map_err(|error| Error::TemplateSyntax(describe(&error)))
}

fn environment() -> Result<Environment<'static>> {
    let mut env = Environment::new();
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_formatter(|out, _state, value| {
        let shown;
        let text = match value.as_str() {
            Some(text) => text,
            None => {
                shown = python::to_str(value)?;
                &shown
            }
        };
        ledger::emit(text.len())?;
        out.write_str(text).map_err(minijinja::Error::from)
    });
    env.set_fuel(Some(FUEL));
    env.set_recursion_limit(RECURSION_LIMIT);
    env.set_unknown_method_callback(methods::call);
    // It prints the whole state, and Jinja has no such function.
    env.remove_global("debug");
    env.add_function("raise_exception", raise_exception);
    env.add_function("cycler", |items: Rest<Value>| {
        ledger::pin(OBJECT_BYTES + items.len() * size_of::<Value>())?;
        minijinja_contrib::globals::cycler(items.to_vec())
    });
    env.add_function("joiner", |separator: Option<Value>| {
        ledger::pin(OBJECT_BYTES).map(|()| minijinja_contrib::globals::joiner(separator))
    });
    hooks::register(&mut env);
    let held = |text: FilterResult| text.map(Value::from).and_then(ledger::hold);
    env.add_filter("tojson", move |value: &Value, placed: Rest<Value>, named: Kwargs| {
        held(tojson::filter(value, placed, named))
    });
    env.add_filter("string", move |value: &Value| held(python::to_str(value)));
    env.add_filter("pprint", move |value: &Value| held(pretty(value)));
    env.add_filter("items", |value: &Value| methods::items_filter(value).and_then(ledger::hold));
    env.add_filter(
        "indent",
        move |text: &Value, width: Option<Value>, first: Option<bool>, blank: Option<bool>, named: Kwargs| {
            held(indent(text, width, first, blank, named))
        },
    );
    is_tests::register(&mut env);
    Ok(env)
}

fn raise_exception(message: Value, _: Kwargs) -> Result<Value, minijinja::Error> {
    let message = python::to_str(&message)?;
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Refused(message)))
}

/// Shows values as minijinja does, for people who debug a template.
fn pretty(value: &Value) -> FilterResult {
    let mut out = Text::default();
    out.push_fmt(format_args!("{value:#?}"))?;
    Ok(out.into_string())
}

/// Jinja's `indent`, which keeps a last newline where the engine's own drops it.
fn indent(text: &Value, width: Option<Value>, first: Option<bool>, blank: Option<bool>, named: Kwargs) -> FilterResult {
    const MAX_WIDTH: usize = 1024;
    let width = if width.is_some() { width } else { named.get("width")? };
    let first = first.or(named.get("first")?).unwrap_or(false);
    let blank = blank.or(named.get("blank")?).unwrap_or(false);
    named.assert_all_used()?;
    let indention = match width {
        Some(width) if width.as_str().is_some() => python::to_str(&width)?,
        Some(width) => " ".repeat(width.as_usize().unwrap_or(0).min(MAX_WIDTH)),
        None => " ".repeat(4),
    };
    let mut out = Text::default();
    if first {
        out.push(&indention)?;
    }
    for (index, line) in python::to_str(text)?.split('\n').enumerate() {
        if index > 0 {
            out.push("\n")?;
            if blank || !line.is_empty() {
                out.push(&indention)?;
            }
        }
        out.push(line)?;
    }
    Ok(out.into_string())
}

/// The variables of one render, as transformers passes them: `tools` and `documents` are none when
/// not given.
fn context(request: &ChatRender) -> Result<Value> {
    let mut messages = Vec::with_capacity(request.messages.len());
    for (index, message) in request.messages.iter().enumerate() {
        let Json::Object(message) = message else {
            return Err(Error::TemplateRender(format!("message {index} is not an object")));
        };
        messages.push(python::from_json(&Json::Object(alias_reasoning(message))));
    }
    let optional = |value: &Option<Json>| value.as_ref().map_or(Value::from(()), python::from_json);
    let mut pairs = vec![
        ("messages".to_string(), Value::from(messages)),
        ("tools".to_string(), optional(&request.tools)),
        ("documents".to_string(), optional(&request.documents)),
        ("add_generation_prompt".to_string(), Value::from(request.add_generation_prompt)),
    ];
    if let Some(now) = request.now {
        let tell =
            move |format: &str| hooks::room_for_parts(format.len(), format).map(|()| strftime::format(now, format));
        pairs.push(("strftime_now".to_string(), Value::from_function(tell)));
    }
    for (name, value) in &request.extra {
        if RESERVED.contains(&name.as_str()) {
            return Err(Error::TemplateRender(format!("the variable {name} is reserved")));
        }
        pairs.push((name.clone(), python::from_json(value)));
    }
    Ok(Value::from_pairs(pairs))
}

/// A message's reasoning is known by three names; templates read the first, gpt-oss the second.
fn alias_reasoning(message: &Map<String, Json>) -> Map<String, Json> {
    const FIELDS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
    let reasoning = FIELDS.iter().filter_map(|field| message.get(*field)).find(|value| !value.is_null());
    let Some(reasoning) = reasoning else {
        return message.clone();
    };
    let mut aliased = Map::new();
    aliased.insert("thinking".into(), reasoning.clone());
    for (key, value) in message {
        aliased.insert(key.clone(), value.clone());
    }
    aliased.insert("reasoning_content".into(), reasoning.clone());
    aliased
}

fn classify(error: &minijinja::Error, limit: usize) -> Error {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = source {
        if let Some(Refused(message)) = current.downcast_ref::<Refused>() {
            return Error::TemplateRefused(message.clone());
        }
        source = current.source();
    }
    match error.kind() {
        ErrorKind::WriteFailure => Error::TemplateOutput { limit },
        ErrorKind::OutOfFuel => Error::TemplateRender(format!("it ran more than {FUEL} instructions")),
        _ => Error::TemplateRender(describe(error)),
    }
}

fn describe(error: &minijinja::Error) -> String {
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_string);
    match error.line() {
        Some(line) => format!("line {line}: {detail}"),
        None => detail,
    }
}

/// Bytes of the caller's input, for the output limit.
fn input_bytes(request: &ChatRender) -> usize {
    let values = request.messages.iter().chain(&request.tools).chain(&request.documents).chain(request.extra.values());
    values.map(json_bytes).sum()
}

fn json_bytes(value: &Json) -> usize {
    match value {
        Json::String(text) => text.len() + 2,
        Json::Array(items) => items.iter().map(|item| json_bytes(item) + 2).sum::<usize>() + 2,
        Json::Object(map) => map.iter().map(|(key, value)| key.len() + json_bytes(value) + 4).sum::<usize>() + 2,
        _ => 24,
    }
}
