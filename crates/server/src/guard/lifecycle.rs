//! Whether the server is loading its model, answers, or is about to end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use tokio::sync::watch;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    Loading,
    Ready,
    Draining,
}

/// One value, shared by clones. A server may go back from Ready to Loading when its engine
/// restarts; nothing follows Draining.
#[derive(Clone, Debug)]
pub struct Lifecycle(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// The value in `changes`, for readers that check it once a request. Written only while the
    /// channel is being modified.
    phase: AtomicU8,
    changes: watch::Sender<Phase>,
}

impl Default for Lifecycle {
    fn default() -> Self {
        Self::new()
    }
}

impl Lifecycle {
    /// The state of a server that is still loading its model.
    pub fn new() -> Self {
        let changes = watch::Sender::new(Phase::Loading);
        Self(Arc::new(Shared { phase: AtomicU8::new(Phase::Loading as u8), changes }))
    }

    pub fn phase(&self) -> Phase {
        match self.0.phase.load(Ordering::SeqCst) {
            0 => Phase::Loading,
            1 => Phase::Ready,
            _ => Phase::Draining,
        }
    }

    pub fn is_loading(&self) -> bool {
        self.phase() == Phase::Loading
    }

    pub fn is_ready(&self) -> bool {
        self.phase() == Phase::Ready
    }

    pub fn is_draining(&self) -> bool {
        self.phase() == Phase::Draining
    }

    pub fn set_loading(&self) {
        self.set(Phase::Loading);
    }

    pub fn set_ready(&self) {
        self.set(Phase::Ready);
    }

    pub fn set_draining(&self) {
        self.set(Phase::Draining);
    }

    fn set(&self, next: Phase) {
        self.0.changes.send_if_modified(|phase| {
            if *phase == Phase::Draining || *phase == next {
                return false;
            }
            *phase = next;
            self.0.phase.store(next as u8, Ordering::SeqCst);
            true
        });
    }

    /// Returns once the server is ready, or draining, which ends all waiting.
    pub async fn ready(&self) {
        self.reach(|phase| phase != Phase::Loading).await;
    }

    /// Returns once the server is draining.
    pub async fn draining(&self) {
        self.reach(|phase| phase == Phase::Draining).await;
    }

    async fn reach(&self, wanted: impl Fn(Phase) -> bool) {
        let mut changes = self.0.changes.subscribe();
        // The sender lives in `self`, so the channel cannot close under this wait.
        let _ = changes.wait_for(|phase| wanted(*phase)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_follows_draining() {
        let lifecycle = Lifecycle::new();
        assert!(lifecycle.is_loading());
        lifecycle.set_ready();
        assert!(lifecycle.is_ready());
        lifecycle.set_loading();
        assert!(lifecycle.is_loading());
        lifecycle.clone().set_draining();
        lifecycle.set_ready();
        lifecycle.set_loading();
        assert!(lifecycle.is_draining());
    }

    #[tokio::test]
    async fn those_who_wait_hear_of_it() {
        let lifecycle = Lifecycle::new();
        let (ready, draining) = (lifecycle.clone(), lifecycle.clone());
        let ready = tokio::spawn(async move { ready.ready().await });
        let draining = tokio::spawn(async move { draining.draining().await });
        lifecycle.set_ready();
        ready.await.unwrap();
        assert!(!draining.is_finished());
        lifecycle.set_draining();
        draining.await.unwrap();
        lifecycle.draining().await;
        lifecycle.ready().await;
    }
}
