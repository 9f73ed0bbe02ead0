//! The lines of a chat, read by one thread that lives as long as the chat.
//!
//! A read cannot be cancelled once it waits, so it is never given up: [`Lines::next`] may be
//! dropped half-way, and the next call gets the line. Lines are read only on request, so that
//! between questions the terminal belongs to the answer.

use std::io::{BufRead, IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use rustyline::config::{Behavior, BellStyle, Config};
use rustyline::error::ReadlineError;
use rustyline::history::MemHistory;
use rustyline::{Cmd, ConditionalEventHandler, Editor, Event, EventContext, EventHandler, KeyEvent, RepeatCount};

const PROMPT: &str = "> ";
/// Lines in the history of the Up key.
const REMEMBERED: usize = 1000;

#[derive(Debug, PartialEq, Eq)]
pub enum Line {
    Text(String),
    /// Ctrl-C: the typed text is discarded.
    Cleared,
    End,
}

/// Source of lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A file or another program.
    Pipe,
    /// A terminal that cannot move its cursor.
    Dumb,
    /// A terminal on which lines can be edited. Text that is pasted at once is one line, even with
    /// line ends in it.
    Editor,
}

pub struct Lines {
    wanted: flume::Sender<()>,
    lines: flume::Receiver<Result<Line>>,
    /// Whether a line was requested and has not arrived.
    pending: bool,
}

impl Lines {
    pub fn start(source: Source) -> Result<Self> {
        let (wanted, asked) = flume::unbounded();
        let (sender, lines) = flume::unbounded();
        let read = move || {
            let mut reader = match Reader::open(source) {
                Ok(reader) => reader,
                Err(error) => return drop(sender.send(Err(error))),
            };
            while asked.recv().is_ok() && sender.send(reader.line()).is_ok() {}
        };
        std::thread::Builder::new().name("folio-lines".into()).spawn(read)?;
        Ok(Self { wanted, lines, pending: false })
    }

    /// The next line. A line that arrives after this future was dropped is not lost.
    pub async fn next(&mut self) -> Result<Line> {
        if !self.pending {
            // The thread has ended if it could not begin, and then has reported the reason.
            let _ = self.wanted.send(());
            self.pending = true;
        }
        let line = self.lines.recv_async().await.context("the thread that reads lines has ended")?;
        self.pending = false;
        line
    }
}

enum Reader {
    Plain { prompts: bool },
    Editor { editor: Box<Editor<(), MemHistory>>, cleared: Arc<AtomicBool> },
}

impl Reader {
    fn open(source: Source) -> Result<Self> {
        if source != Source::Editor {
            return Ok(Self::Plain { prompts: source == Source::Dumb });
        }
        // The prompt is for the terminal, wherever the answers go.
        let behavior = if std::io::stdout().is_terminal() { Behavior::Stdio } else { Behavior::PreferTerm };
        let config =
            Config::builder().behavior(behavior).bell_style(BellStyle::None).max_history_size(REMEMBERED)?.build();
        let history = MemHistory::with_config(&config);
        let mut editor = Editor::with_history(config, history).context("could not open the terminal")?;
        let cleared = Arc::new(AtomicBool::new(false));
        let clear = Box::new(Clear(Arc::clone(&cleared)));
        editor.bind_sequence(KeyEvent::ctrl('c'), EventHandler::Conditional(clear));
        Ok(Self::Editor { editor: Box::new(editor), cleared })
    }

    fn line(&mut self) -> Result<Line> {
        let (editor, cleared) = match self {
            Self::Plain { prompts } => return plain(*prompts),
            Self::Editor { editor, cleared } => (editor, cleared),
        };
        let line = editor.readline(PROMPT);
        match line {
            _ if cleared.swap(false, Ordering::Relaxed) => Ok(Line::Cleared),
            Ok(text) => {
                editor.add_history_entry(text.as_str()).context("the history")?;
                Ok(Line::Text(text))
            }
            Err(ReadlineError::Interrupted) => Ok(Line::Cleared),
            Err(ReadlineError::Eof) => Ok(Line::End),
            Err(error) => Err(error).context("could not read from the terminal"),
        }
    }
}

fn plain(prompts: bool) -> Result<Line> {
    if prompts {
        // If the prompt cannot be shown, the user can type all the same.
        let _ = std::io::stderr().write_all(PROMPT.as_bytes());
    }
    let mut line = String::new();
    let bytes = std::io::stdin().lock().read_line(&mut line).context("could not read standard input")?;
    Ok(if bytes > 0 { Line::Text(line) } else { Line::End })
}

/// Ctrl-C ends the line, and it is discarded. By default the editor returns an error, which would
/// lose the text typed behind it.
struct Clear(Arc<AtomicBool>);

impl ConditionalEventHandler for Clear {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, _: &EventContext<'_>) -> Option<Cmd> {
        self.0.store(true, Ordering::Relaxed);
        Some(Cmd::AcceptLine)
    }
}
