//! Copies of KV blocks between device and host that may run beside steps.

use crate::{HostMemory, Operations};

/// Starts copies of blocks. A device without a copy engine completes each at once.
pub trait BlockCopies: Operations {
    /// As [`save_block`](Operations::save_block), but the copy may still be in flight when this
    /// returns: then the result is `None`, and [`BlockCopies::moved`] gives the memory back. Later
    /// operations do not change the bytes that are saved.
    fn start_save(
        &mut self,
        kv: &Self::Kv,
        block: u32,
        mut memory: Box<dyn HostMemory>,
    ) -> Option<Box<dyn HostMemory>> {
        self.save_block(kv, block, &mut memory);
        Some(memory)
    }

    /// As [`load_block`](Operations::load_block), in the same way.
    fn start_load(
        &mut self,
        kv: &mut Self::Kv,
        block: u32,
        memory: Box<dyn HostMemory>,
    ) -> Option<Box<dyn HostMemory>> {
        self.load_block(kv, block, &memory);
        Some(memory)
    }

    /// Waits for the oldest copy in flight and gives its memory back. Once a step that was
    /// submitted after the copy is collected, the copy is done and this does not wait.
    fn moved(&mut self) -> Box<dyn HostMemory> {
        panic!("this device copies blocks at once");
    }
}
