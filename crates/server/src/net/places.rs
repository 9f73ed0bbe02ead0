//! The limited places of connections, and the choice of a connection to evict when all are taken.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use super::activity::{Activity, Patience};
use super::stats::{ConnectionStats, count};

/// Interval at which waiting connections check the places by themselves.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

pub(super) struct Places {
    limit: usize,
    taken: Mutex<Taken>,
    /// Told when a place becomes free, or a connection may now give way.
    room: Arc<Notify>,
    stats: Arc<ConnectionStats>,
}

#[derive(Default)]
struct Taken {
    connections: HashMap<u64, Arc<Activity>>,
    next: u64,
}

/// A connection's place; free again when this is dropped.
pub(super) struct Place {
    id: u64,
    places: Arc<Places>,
    pub activity: Arc<Activity>,
}

impl Places {
    /// At least one: a server without places could answer no client.
    pub fn new(limit: usize, stats: Arc<ConnectionStats>) -> Arc<Self> {
        Arc::new(Self { limit: limit.max(1), taken: Mutex::default(), room: Arc::default(), stats })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a place is free. Called by the accept loop alone, so the place stays free until
    /// it is taken.
    pub async fn wait_for_room(&self) {
        while self.taken().connections.len() >= self.limit {
            self.evict_one();
            tokio::select! {
                () = self.room.notified() => {}
                // A reader that stalls sends no signal.
                () = tokio::time::sleep(LOOK_AGAIN) => {}
            }
        }
    }

    /// Evicts the connection that has been without a request for longest; if all have one, the one
    /// whose body has been arriving for longest; then the one whose reader has taken nothing for
    /// longest; none if all are being answered. A connection that was told to end and is still
    /// there stays the first choice, so that no other one is evicted in vain.
    pub fn evict_one(&self) {
        let taken = self.taken();
        let candidates = taken.connections.values().filter_map(|activity| Some((activity.dispensable()?, activity)));
        if let Some((_, first)) = candidates.min_by_key(|(dispensable, _)| *dispensable) {
            first.make_room();
        }
    }

    pub fn take(self: &Arc<Self>, patience: Patience) -> Place {
        count(&self.stats.accepted);
        count(&self.stats.open);
        let activity = Arc::new(Activity::new(patience, self.room.clone()));
        let mut taken = self.taken();
        let id = taken.next;
        taken.next += 1;
        taken.connections.insert(id, activity.clone());
        Place { id, places: self.clone(), activity }
    }

    /// Every connection finishes what it is answering and ends.
    pub fn drain(&self) {
        self.taken().connections.values().for_each(|activity| activity.drain());
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.taken().connections.remove(&self.id);
        self.places.stats.open.fetch_sub(1, Ordering::Relaxed);
        self.places.room.notify_one();
    }
}
