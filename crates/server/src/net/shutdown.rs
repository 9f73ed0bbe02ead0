//! The order to end: given once, heard by every listener.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Serving,
    /// No more connections; those that answer something finish it, until `deadline` if there is
    /// one.
    Closing {
        deadline: Option<Instant>,
    },
    Aborted,
}

/// The receiver of the order, a clone for each `serve`. If every handle is dropped without an
/// order, the server goes on.
#[derive(Clone, Debug)]
pub struct Shutdown(watch::Receiver<Stage>);

/// The sender of the order.
#[derive(Clone, Debug)]
pub struct ShutdownHandle(watch::Sender<Stage>);

impl Shutdown {
    pub fn new() -> (ShutdownHandle, Self) {
        let (sender, receiver) = watch::channel(Stage::Serving);
        (ShutdownHandle(sender), Self(receiver))
    }

    /// The first stage after `Serving`; never, if no order comes.
    pub(super) async fn ordered(&mut self) -> Stage {
        let ordered = self.0.wait_for(|stage| *stage != Stage::Serving).await.map(|stage| *stage);
        match ordered {
            Ok(stage) => stage,
            Err(_) => std::future::pending().await,
        }
    }

    /// Returns when connections are to be dropped as they are.
    pub(super) async fn out_of_time(&mut self) {
        loop {
            let stage = *self.0.borrow_and_update();
            let reached = async {
                match stage {
                    Stage::Aborted => {}
                    Stage::Closing { deadline: Some(deadline) } => tokio::time::sleep_until(deadline).await,
                    Stage::Closing { deadline: None } | Stage::Serving => std::future::pending().await,
                }
            };
            let changed = async {
                if self.0.changed().await.is_err() {
                    // Without a handle no other order will come.
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                () = reached => return,
                () = changed => {}
            }
        }
    }
}

impl ShutdownHandle {
    /// No more connections; open ones finish what they are answering, and then `serve` returns.
    pub fn close(&self) {
        self.advance(Stage::Closing { deadline: None });
    }

    /// Closes like `close`, and drops connections that are left after `time`.
    pub fn close_within(&self, time: Duration) {
        self.advance(Stage::Closing { deadline: Some(Instant::now() + time) });
    }

    /// Drops every connection as it is.
    pub fn abort(&self) {
        self.advance(Stage::Aborted);
    }

    fn advance(&self, to: Stage) {
        self.0.send_if_modified(|stage| {
            let moves = *stage != Stage::Aborted && *stage != to;
            if moves {
                *stage = to;
            }
            moves
        });
    }
}
