//! Signals that ask the program to stop, as a stream.

use std::io;
use std::process::ExitCode;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    Interrupt,
    Terminate,
    Hangup,
    Quit,
}

impl Signal {
    pub fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
            Self::Hangup => "SIGHUP",
            Self::Quit => "SIGQUIT",
        }
    }

    /// The exit status of a process that the signal killed, in a shell's convention.
    pub fn exit_code(self) -> ExitCode {
        let number = match self {
            Self::Hangup => 1,
            Self::Interrupt => 2,
            Self::Quit => 3,
            Self::Terminate => 15,
        };
        ExitCode::from(128 + number)
    }
}

/// Signals since this was created: a signal that is not awaited yet is stored, and none ends the
/// process by itself.
#[cfg(unix)]
pub struct Signals(Vec<(Signal, tokio::signal::unix::Signal)>);

#[cfg(unix)]
impl Signals {
    pub fn of(signals: &[Signal]) -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        let kind = |signal| match signal {
            Signal::Interrupt => SignalKind::interrupt(),
            Signal::Terminate => SignalKind::terminate(),
            Signal::Hangup => SignalKind::hangup(),
            Signal::Quit => SignalKind::quit(),
        };
        signals.iter().map(|&wanted| Ok((wanted, signal(kind(wanted))?))).collect::<io::Result<_>>().map(Self)
    }

    /// The next signal.
    pub async fn next(&mut self) -> Signal {
        use std::task::Poll;
        std::future::poll_fn(|context| {
            let come = self.0.iter_mut().find_map(|(signal, stream)| match stream.poll_recv(context) {
                Poll::Ready(Some(())) => Some(*signal),
                Poll::Ready(None) | Poll::Pending => None,
            });
            come.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}

#[cfg(not(unix))]
pub struct Signals;

#[cfg(not(unix))]
impl Signals {
    pub fn of(_: &[Signal]) -> io::Result<Self> {
        Ok(Self)
    }

    pub async fn next(&mut self) -> Signal {
        match tokio::signal::ctrl_c().await {
            Ok(()) => Signal::Interrupt,
            Err(_) => std::future::pending().await,
        }
    }
}
