//! A response as events, each with its name and its number.

use serde::Serialize;

use super::object::{Answer, Draft, Object, OutputMessage, OutputText, Stage, Usage};
use super::{Keeping, keep};
use crate::answers::Answers;
use crate::error::ApiError;
use crate::routes::wire::{Entry, entries};
use crate::sse::{EventWriter, Gone};
use crate::text_stream::{Finish, Piece};

/// Writes events and numbers them.
struct Events {
    writer: EventWriter,
    next: u64,
}

#[derive(Serialize)]
struct Event<'a, T> {
    #[serde(rename = "type")]
    kind: &'a str,
    sequence_number: u64,
    #[serde(flatten)]
    body: T,
}

impl Events {
    fn push(&mut self, kind: &str, body: impl Serialize) {
        let event = Event { kind, sequence_number: self.next, body };
        self.next += 1;
        self.writer.push(Some(kind), &event);
    }

    fn response(&mut self, kind: &str, response: Object<'_>) {
        self.push(kind, ResponseBody { response });
    }
}

#[derive(Serialize)]
struct ResponseBody<'a> {
    response: Object<'a>,
}

#[derive(Serialize)]
struct ItemBody<'a> {
    output_index: usize,
    item: OutputMessage<'a>,
}

/// Place of a text: there is one item with one part.
#[derive(Clone, Copy, Serialize)]
struct Place<'a> {
    item_id: &'a str,
    output_index: usize,
    content_index: usize,
}

#[derive(Serialize)]
struct PartBody<'a> {
    #[serde(flatten)]
    place: Place<'a>,
    part: OutputText<'a>,
}

#[derive(Serialize)]
struct DeltaBody<'a> {
    #[serde(flatten)]
    place: Place<'a>,
    delta: &'a str,
    logprobs: Vec<Entry<'a>>,
}

#[derive(Serialize)]
struct TextBody<'a> {
    #[serde(flatten)]
    place: Place<'a>,
    text: &'a str,
    logprobs: Vec<Entry<'a>>,
}

/// Writes it all, from the first event to the last.
pub async fn write(
    draft: Draft,
    keeping: Option<Keeping>,
    num_input_tokens: usize,
    mut answers: Answers,
    writer: EventWriter,
) -> Result<(), Gone> {
    let mut events = Events { writer, next: 0 };
    let mut answer = Answer::default();
    begin(&mut events, &draft, keeping.is_some());
    events.writer.flush().await?;
    loop {
        let Some(piece) = answers.next_for(&events.writer).await? else { break };
        let is_told = delta(&mut events, &draft, &piece);
        answer.text.push_str(&piece.text);
        answer.tokens.extend(piece.tokens.into_iter().filter(|token| token.logprobs.is_some()));
        match piece.finish {
            None if is_told => {}
            None => continue,
            Some((Finish::Failed(error), _)) => fail(&mut events, &draft, &error),
            Some((finish, used)) => {
                answer.end(&finish);
                end(&mut events, &draft, &answer, Usage::new(num_input_tokens, &used), keeping.as_ref());
            }
        }
        events.writer.flush().await?;
    }
    Ok(())
}

fn begin(events: &mut Events, draft: &Draft, store: bool) {
    events.response("response.created", draft.object(Stage::Begun, store));
    events.response("response.in_progress", draft.object(Stage::Begun, store));
    let item = OutputMessage {
        id: &draft.item_id,
        kind: "message",
        status: "in_progress",
        role: "assistant",
        content: Vec::new(),
    };
    events.push("response.output_item.added", ItemBody { output_index: 0, item });
    let part = OutputText::new("", Vec::new());
    events.push("response.content_part.added", PartBody { place: place(draft), part });
}

fn place(draft: &Draft) -> Place<'_> {
    Place { item_id: &draft.item_id, output_index: 0, content_index: 0 }
}

/// Whether there is anything to tell: half a character, or what may be the beginning of a stop
/// text, is held back.
fn delta(events: &mut Events, draft: &Draft, piece: &Piece) -> bool {
    let logprobs = entries(&draft.service.model.tokenizer, &piece.tokens);
    let is_told = !piece.text.is_empty() || !logprobs.is_empty();
    if is_told {
        let body = DeltaBody { place: place(draft), delta: &piece.text, logprobs };
        events.push("response.output_text.delta", body);
    }
    is_told
}

fn end(events: &mut Events, draft: &Draft, answer: &Answer, usage: Usage, keeping: Option<&Keeping>) {
    let logprobs = || entries(&draft.service.model.tokenizer, &answer.tokens);
    let place = place(draft);
    let body = TextBody { place, text: &answer.text, logprobs: logprobs() };
    events.push("response.output_text.done", body);
    let part = OutputText::new(&answer.text, logprobs());
    events.push("response.content_part.done", PartBody { place, part });
    let item = draft.message(answer);
    events.push("response.output_item.done", ItemBody { output_index: 0, item });
    let kept = keeping.is_some_and(|keeping| keep(draft, keeping, answer, usage).is_some());
    let object = draft.object(Stage::Ended { answer, usage }, kept);
    let kind = if answer.is_whole { "response.completed" } else { "response.incomplete" };
    events.response(kind, object);
}

/// A failed response is not stored.
fn fail(events: &mut Events, draft: &Draft, error: &ApiError) {
    events.response("response.failed", draft.object(Stage::Failed(error), false));
}
