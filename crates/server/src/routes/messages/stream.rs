//! A message as events.

use serde::Serialize;

use super::object::{Envelope, Message, Stop, TextBlock, Usage, stop};
use crate::answers::Answers;
use crate::error::ErrorStyle;
use crate::sse::{EventWriter, Gone};
use crate::text_stream::Finish;

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Event<'a> {
    MessageStart { message: Message<'a> },
    ContentBlockStart { index: usize, content_block: TextBlock<'a> },
    Ping,
    ContentBlockDelta { index: usize, delta: Delta<'a> },
    ContentBlockStop { index: usize },
    MessageDelta { delta: Stop<'a>, usage: Usage },
    MessageStop,
}

#[derive(Serialize)]
#[serde(tag = "type", rename = "text_delta")]
struct Delta<'a> {
    text: &'a str,
}

impl Event<'_> {
    fn name(&self) -> &'static str {
        match self {
            Self::MessageStart { .. } => "message_start",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::Ping => "ping",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
        }
    }
}

fn push(writer: &mut EventWriter, event: &Event<'_>) {
    writer.push(Some(event.name()), event);
}

/// Writes it all, from the first event to the last.
pub async fn write(
    envelope: Envelope,
    num_input_tokens: usize,
    mut answers: Answers,
    mut writer: EventWriter,
) -> Result<(), Gone> {
    // How much of the prompt the cache had is known at the end, and said there.
    push(&mut writer, &Event::MessageStart { message: envelope.begun(num_input_tokens) });
    push(&mut writer, &Event::ContentBlockStart { index: 0, content_block: TextBlock::new("") });
    push(&mut writer, &Event::Ping);
    writer.flush().await?;
    loop {
        let Some(piece) = answers.next_for(&writer).await? else { return Ok(()) };
        if !piece.text.is_empty() {
            push(&mut writer, &Event::ContentBlockDelta { index: 0, delta: Delta { text: &piece.text } });
        }
        match &piece.finish {
            None if piece.text.is_empty() => continue,
            None => {}
            Some((Finish::Failed(error), _)) => writer.push(Some("error"), &error.body(ErrorStyle::Anthropic)),
            Some((finish, used)) => {
                let usage = Usage::new(num_input_tokens, used);
                push(&mut writer, &Event::ContentBlockStop { index: 0 });
                push(&mut writer, &Event::MessageDelta { delta: stop(Some(finish)), usage });
                push(&mut writer, &Event::MessageStop);
            }
        }
        writer.flush().await?;
    }
}
