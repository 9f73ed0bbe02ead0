//! The host tier: a fixed number of slots for each layer group, each for one block.
//!
//! The scheduler decides which slot is used when: a slot belongs to a transfer of the step in
//! flight or to one disk task, never to both. The locks only make that safe to rely on; no thread
//! waits long for one. A slot gets its memory at its first use and keeps it; a size that the system
//! would never give is refused at the start. `allocate` may give memory that the device reaches
//! faster.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use folio_device::HostMemory;
use folio_scheduler::HostSlot;

use super::TierError;

/// Number and size of the blocks of one layer group in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostGroup {
    pub slots: usize,
    pub block_bytes: usize,
}

pub struct HostTier {
    groups: Vec<Slots>,
    allocate: Allocate,
}

/// Gives this many zero bytes.
pub type Allocate = Box<dyn Fn(usize) -> Box<dyn HostMemory> + Send + Sync>;

struct Slots {
    shape: HostGroup,
    slots: Vec<Mutex<Slot>>,
}

#[derive(Default)]
enum Slot {
    /// Not used yet.
    #[default]
    New,
    Here(Box<dyn HostMemory>),
    /// The memory was taken for a copy.
    Away,
}

/// Exclusive access to a slot's bytes.
pub struct HostSlotBytes<'a> {
    slot: MutexGuard<'a, Slot>,
}

impl Deref for HostSlotBytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &*self.slot {
            Slot::Here(memory) => memory,
            Slot::New | Slot::Away => &[],
        }
    }
}

impl DerefMut for HostSlotBytes<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut *self.slot {
            Slot::Here(memory) => memory,
            Slot::New | Slot::Away => &mut [],
        }
    }
}

impl HostTier {
    /// In ordinary memory.
    pub fn new(groups: &[HostGroup]) -> Result<Self, TierError> {
        Self::with_memory(groups, Box::new(|bytes| Box::new(vec![0; bytes].into_boxed_slice())))
    }

    /// A tier in memory that `allocate` gives.
    pub fn with_memory(groups: &[HostGroup], allocate: Allocate) -> Result<Self, TierError> {
        let bytes = groups.iter().fold(0, |sum: u64, group| sum.saturating_add(group.bytes()));
        // Asks the system for all of the address space, and returns it at once.
        let all = usize::try_from(bytes).map_err(|_| TierError::HostMemory { bytes })?;
        Vec::<u8>::new().try_reserve_exact(all).map_err(|_| TierError::HostMemory { bytes })?;
        let slots =
            |group: &HostGroup| Slots { shape: *group, slots: (0..group.slots).map(|_| Mutex::default()).collect() };
        Ok(Self { groups: groups.iter().map(slots).collect(), allocate })
    }

    pub fn num_groups(&self) -> usize {
        self.groups.len()
    }

    pub fn group(&self, group: usize) -> HostGroup {
        self.groups[group].shape
    }

    /// Bytes of all slots: the most memory that this tier takes.
    pub fn bytes(&self) -> u64 {
        self.groups.iter().map(|group| group.shape.bytes()).sum()
    }

    /// The bytes of a slot, zeros at first. Panics if the slot does not exist.
    pub fn slot(&self, group: usize, slot: HostSlot) -> HostSlotBytes<'_> {
        let mut slot = self.lock(group, slot);
        match &*slot {
            Slot::Here(_) => {}
            Slot::New => *slot = Slot::Here(self.allocate(group)),
            Slot::Away => panic!("a slot is used while a block is copied from it or to it"),
        }
        HostSlotBytes { slot }
    }

    /// Takes the memory out of a slot, for a copy that the device makes. Using the slot in the
    /// meantime is a bug.
    pub fn take(&self, group: usize, slot: HostSlot) -> Box<dyn HostMemory> {
        let mut slot = self.lock(group, slot);
        match std::mem::replace(&mut *slot, Slot::Away) {
            Slot::Here(memory) => memory,
            Slot::New => self.allocate(group),
            Slot::Away => panic!("a slot is used while a block is copied from it or to it"),
        }
    }

    /// Returns memory that was taken.
    pub fn put_back(&self, group: usize, slot: HostSlot, memory: Box<dyn HostMemory>) {
        assert_eq!(memory.len(), self.groups[group].shape.block_bytes, "bytes of a block");
        *self.lock(group, slot) = Slot::Here(memory);
    }

    fn lock(&self, group: usize, slot: HostSlot) -> MutexGuard<'_, Slot> {
        // A panic cannot have broken bytes: they have no invariant.
        self.groups[group].slots[slot.0 as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn allocate(&self, group: usize) -> Box<dyn HostMemory> {
        let bytes = self.groups[group].shape.block_bytes;
        let memory = (self.allocate)(bytes);
        assert_eq!(memory.len(), bytes, "bytes of a block");
        memory
    }
}

impl HostGroup {
    fn bytes(&self) -> u64 {
        (self.slots as u64).saturating_mul(self.block_bytes as u64)
    }
}

impl std::fmt::Debug for HostTier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.groups.iter().map(|group| group.shape)).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_apart_and_counted() {
        let groups = [HostGroup { slots: 3, block_bytes: 8 }, HostGroup { slots: 2, block_bytes: 5 }];
        let tier = HostTier::new(&groups).unwrap();
        assert_eq!((tier.num_groups(), tier.bytes()), (2, 34));
        assert_eq!(tier.group(1), groups[1]);
        for (group, slot, value) in [(0, 0, 1), (0, 2, 2), (1, 1, 3)] {
            tier.slot(group, HostSlot(slot)).fill(value);
        }
        assert_eq!(*tier.slot(0, HostSlot(0)), [1; 8]);
        assert_eq!(*tier.slot(0, HostSlot(1)), [0; 8]);
        assert_eq!(*tier.slot(0, HostSlot(2)), [2; 8]);
        assert_eq!(*tier.slot(1, HostSlot(1)), [3; 5]);
        assert_eq!(HostTier::new(&[]).unwrap().bytes(), 0);
    }

    #[test]
    fn memory_is_asked_for_when_it_is_used() {
        let (sizes, asked) = std::sync::mpsc::channel();
        let sizes = Mutex::new(sizes);
        let allocate = move |bytes: usize| -> Box<dyn HostMemory> {
            let _ = sizes.lock().unwrap().send(bytes);
            Box::new(vec![9; bytes])
        };
        let groups = [HostGroup { slots: 3, block_bytes: 8 }, HostGroup { slots: 2, block_bytes: 5 }];
        let tier = HostTier::with_memory(&groups, Box::new(allocate)).unwrap();
        assert!(asked.try_recv().is_err());
        for _ in 0..2 {
            assert_eq!(*tier.slot(1, HostSlot(1)), [9; 5]);
        }
        tier.slot(0, HostSlot(0)).fill(1);
        assert_eq!(asked.try_iter().collect::<Vec<_>>(), [5, 8]);
    }

    #[test]
    fn memory_that_is_away_comes_back() {
        let tier = HostTier::new(&[HostGroup { slots: 2, block_bytes: 4 }]).unwrap();
        tier.slot(0, HostSlot(1)).fill(7);
        let (new, mut used) = (tier.take(0, HostSlot(0)), tier.take(0, HostSlot(1)));
        assert_eq!([new.to_vec(), used.to_vec()], [[0; 4], [7; 4]]);
        used[2] = 1;
        tier.put_back(0, HostSlot(1), used);
        assert_eq!(*tier.slot(0, HostSlot(1)), [7, 7, 1, 7]);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| tier.slot(0, HostSlot(0)).len())).is_err());
    }

    #[test]
    fn an_impossible_size_is_an_error() {
        for (slots, block_bytes) in [(usize::MAX, usize::MAX), (1 << 40, 1 << 20), (usize::MAX / 2, 1)] {
            let error = HostTier::new(&[HostGroup { slots, block_bytes }]).unwrap_err();
            assert!(matches!(error, TierError::HostMemory { .. }), "{error}");
        }
    }
}
