//! The chat of `folio run`: reads a line, answers it, and reads the next.
//!
//! Lines are read by a thread of their own, and only when they are asked for ([`Lines`]). Ctrl-C while an answer comes stops
//! the answer; at the prompt it clears the line. However the chat ends, the terminal is left as it was ([`Terminal`]).

use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::Result;
use folio_terminal::{Line, Lines, Signal, Signals, Source, Terminal};

use crate::print::ReaderLeft;
use crate::run::Chat;

/// Terminals whose cursor cannot be moved: their own line discipline edits the line.
const DUMB: [&str; 3] = ["dumb", "cons25", "emacs"];

/// Talks until the input ends, `/exit` is typed, or a signal asks for the end.
pub async fn converse(chat: &mut Chat) -> Result<ExitCode> {
    let source = source();
    if source != Source::Pipe {
        say!(
            "{}: ask away; Ctrl-C stops an answer, /new starts anew, Ctrl-D or /exit leaves",
            chat.session.assets.name
        );
    }
    if source == Source::Editor {
        // All that would end the program with the terminal as the chat has it. Elsewhere nohup means what it says.
        let all = [Signal::Interrupt, Signal::Terminate, Signal::Hangup, Signal::Quit];
        chat.signals = Signals::of(&all)?;
    }
    let system = chat.messages.clone();
    // Before the lines: it remembers how the terminal was.
    let terminal = Terminal::keep(source == Source::Editor);
    let mut lines = Lines::start(source)?;
    loop {
        let line = tokio::select! {
            line = lines.next() => line?,
            signal = chat.signals.next() => match signal {
                // The editor sees Ctrl-C as a key: this one was for an answer that had just ended.
                Signal::Interrupt if source == Source::Editor => continue,
                Signal::Interrupt => Line::Cleared,
                signal => return Ok(signal.exit_code()),
            },
        };
        let text = match &line {
            Line::End => return Ok(ExitCode::SUCCESS),
            Line::Cleared => {
                say!("(Ctrl-D or /exit leaves)");
                continue;
            }
            Line::Text(text) => text.trim_end().trim_start_matches(['\r', '\n']),
        };
        match text.trim() {
            "/exit" => return Ok(ExitCode::SUCCESS),
            "" => {}
            "/new" => chat.messages.clone_from(&system),
            _ => {
                terminal.mark_pastes();
                match chat.turn(text).await {
                    Ok(None | Some(Signal::Interrupt)) => {}
                    Ok(Some(signal)) => return Ok(signal.exit_code()),
                    Err(error) if error.is::<ReaderLeft>() => return Err(error),
                    Err(error) => {
                        say!("error: {error:#}");
                        chat.messages.clone_from(&system);
                    }
                }
            }
        }
    }
}

fn source() -> Source {
    let is_dumb = |term: String| DUMB.iter().any(|dumb| dumb.eq_ignore_ascii_case(&term));
    match std::io::stdin().is_terminal() {
        false => Source::Pipe,
        true if std::env::var("TERM").is_ok_and(is_dumb) => Source::Dumb,
        true => Source::Editor,
    }
}
