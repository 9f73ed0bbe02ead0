//! Memory that requests' bodies may take, all together: counted before it is taken.
//!
//! A body takes room for what it was written in and for what its fields say, before the first of it
//! is read, and keeps what it still needs until its request is over. Small bodies have room that
//! large ones cannot take.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;

/// Bodies up to this count as small.
pub const SMALL_BYTES: usize = 64 << 10;

/// Most memory of a body while it is read, as a multiple of its length: the body, a string that is
/// being decoded from it, and the values read from it. `tests/bodies` measures it.
pub const WHILE_READ: usize = 4;

/// The same once it is read: strings are no longer than in the body, and a token id, written in two
/// bytes or more, takes four.
const ONCE_READ: usize = 2;

/// Time that a client waits for room.
const PATIENCE: Duration = Duration::from_secs(5);
/// Delay after which it should try again.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Bytes that one permit of the semaphore stands for.
const UNIT: usize = 1 << 10;

/// Room for one body of the largest size, and for small ones beside it.
pub const fn least(body_bytes: usize) -> usize {
    // A fifth is reserved for small ones.
    let for_large = if body_bytes > SMALL_BYTES { body_bytes } else { SMALL_BYTES } * WHILE_READ;
    for_large / 4 * 5
}

#[derive(Debug)]
pub struct BodyMemory {
    small: Arc<Semaphore>,
    large: Arc<Semaphore>,
    /// Most room of one body; a larger body has been refused, or gets less room than it may take.
    most: usize,
}

impl BodyMemory {
    /// `bytes` are for all bodies; no body is longer than `body_bytes`.
    pub fn new(bytes: usize, body_bytes: usize) -> Self {
        let units = bytes.max(least(body_bytes)).div_ceil(UNIT).min(Semaphore::MAX_PERMITS);
        let small = units / 5;
        Self {
            small: Arc::new(Semaphore::new(small)),
            large: Arc::new(Semaphore::new(units - small)),
            most: body_bytes,
        }
    }

    /// Bytes that no body has taken.
    pub fn free(&self) -> usize {
        (self.small.available_permits() + self.large.available_permits()) * UNIT
    }

    /// Room for a body of this length, or of the largest if that is not known yet; what is small
    /// goes first where large ones wait.
    pub async fn take(&self, length: usize) -> Result<Room, ApiError> {
        let units = units(length.min(self.most), WHILE_READ);
        let is_small = length <= SMALL_BYTES;
        let own = if is_small { &self.small } else { &self.large };
        let others = is_small.then_some(&self.large);
        // The other room is taken only if no request waits for it.
        let now =
            [Some(own), others].into_iter().flatten().find_map(|room| room.clone().try_acquire_many_owned(units).ok());
        if let Some(permit) = now {
            return Ok(Room { permit });
        }
        match tokio::time::timeout(PATIENCE, own.clone().acquire_many_owned(units)).await {
            Ok(Ok(permit)) => Ok(Room { permit }),
            Ok(Err(_)) => Err(ApiError::Stopped),
            Err(_) => Err(ApiError::NoBodyMemory { retry_after: RETRY_AFTER }),
        }
    }
}

fn units(length: usize, times: usize) -> u32 {
    u32::try_from(length.saturating_mul(times).div_ceil(UNIT).max(1)).unwrap_or(u32::MAX)
}

/// Taken until it is dropped.
#[derive(Debug)]
pub struct Room {
    permit: OwnedSemaphorePermit,
}

impl Room {
    /// The body is there, and is this long.
    pub fn shrink(&mut self, length: usize) {
        self.keep(units(length, WHILE_READ));
    }

    /// Its fields have been read.
    pub fn read(&mut self, length: usize) {
        self.keep(units(length, ONCE_READ));
    }

    fn keep(&mut self, units: u32) {
        let over = self.permit.num_permits().saturating_sub(units as usize);
        drop(self.permit.split(over));
    }
}

/// Holds the room of a request's body until its answer has been sent.
#[derive(Clone, Debug, Default)]
pub struct Kept(Arc<Mutex<Option<Room>>>);

impl Kept {
    pub fn keep(&self, room: Room) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(room);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[tokio::test(start_paused = true)]
    async fn large_bodies_wait_for_each_other_and_small_ones_for_none() {
        let memory = BodyMemory::new(20 * MIB, 4 * MIB);
        assert_eq!((memory.free(), least(4 * MIB)), (20 * MIB, 20 * MIB));
        let mut first = memory.take(4 * MIB).await.expect("room for one");
        assert_eq!(memory.free(), 4 * MIB);
        let refused = memory.take(MIB).await.expect_err("no room for another");
        assert_eq!((refused.status().as_u16(), refused.code()), (429, Some("rate_limit_exceeded")));
        // Small ones have theirs.
        let small = [memory.take(SMALL_BYTES).await, memory.take(0).await, memory.take(100).await];
        assert!(small.iter().all(Result::is_ok));
        drop(small);
        first.shrink(MIB);
        assert_eq!(memory.free(), 16 * MIB);
        let second = memory.take(3 * MIB).await.expect("there is room again");
        let waiting = memory.take(MIB);
        first.read(MIB);
        drop(second);
        assert!(waiting.await.is_ok());
        drop(first);
        assert_eq!(memory.free(), 20 * MIB);
    }

    #[tokio::test(start_paused = true)]
    async fn small_bodies_take_what_large_ones_leave() {
        let memory = BodyMemory::new(20 * MIB, 4 * MIB);
        let each = SMALL_BYTES * WHILE_READ;
        let mut taken = Vec::new();
        for _ in 0..20 * MIB / each {
            taken.push(memory.take(SMALL_BYTES).await.expect("all of it"));
        }
        assert!(memory.free() < each && memory.take(SMALL_BYTES).await.is_err());
        taken.clear();
        assert_eq!(memory.free(), 20 * MIB);
        // A body of unknown length takes what the largest would.
        drop(memory.take(usize::MAX).await.expect("room for one"));
        // Less than one body of the largest size is no memory to work with.
        assert_eq!(BodyMemory::new(1, 4 * MIB).free(), least(4 * MIB));
        assert_eq!(BodyMemory::new(1, 1).free(), 5 * SMALL_BYTES);
    }
}
