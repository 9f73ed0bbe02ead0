//! Ordinary memory of the host that the copy engines reach directly for as long as the device
//! lives.
//!
//! Unlike [`Pinned`](super::Pinned) it outlives the device that locked it: after a device was lost
//! its contents are intact, and copies are slower. So it keeps no device open.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Weak};

use cudarc::driver::sys::{self, CUresult};

use super::context::Context;
use super::device::Device;

const PAGE: usize = 4096;

/// Whole pages, so that no two blocks share one.
#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Page([u8; PAGE]);

pub struct HostBlock {
    pages: Box<[Page]>,
    bytes: usize,
    /// The context that locked it; dangling if locking was not possible.
    context: Weak<Context>,
}

impl HostBlock {
    /// `bytes` zeros. If the system does not allow more locked memory, they are ordinary memory.
    pub fn new(device: &Device, bytes: usize) -> HostBlock {
        let mut block = HostBlock::unlocked(bytes);
        let all = block.pages.len() * PAGE;
        if device.bind().is_ok() && all > 0 {
            // SAFETY: this memory is owned by the block, which unlocks it before it is freed; whole
            // pages of its own.
            let code = unsafe {
                let flags = sys::CU_MEMHOSTREGISTER_PORTABLE;
                sys::cuMemHostRegister_v2(block.pages.as_mut_ptr().cast(), all, flags)
            };
            if code == CUresult::CUDA_SUCCESS {
                block.context = Arc::downgrade(&device.context);
            }
        }
        block
    }

    /// Memory of this kind without a device, not page-locked.
    pub fn unlocked(bytes: usize) -> HostBlock {
        let pages = vec![Page([0; PAGE]); bytes.div_ceil(PAGE)].into_boxed_slice();
        HostBlock { pages, bytes, context: Weak::new() }
    }

    pub fn is_locked(&self) -> bool {
        self.context.strong_count() > 0
    }
}

impl Deref for HostBlock {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: pages are bytes without gaps, and there are at least this many of them.
        unsafe { std::slice::from_raw_parts(self.pages.as_ptr().cast(), self.bytes) }
    }
}

impl DerefMut for HostBlock {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.pages.as_mut_ptr().cast(), self.bytes) }
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        // A dropped context has unlocked it.
        if let Some(context) = self.context.upgrade()
            && context.bind().is_ok()
        {
            // SAFETY: locked in `new`, unlocked once; the code that starts a copy from or to it
            // waits for the copy.
            unsafe { sys::cuMemHostUnregister(self.pages.as_mut_ptr().cast()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_as_many_as_asked_for() {
        for bytes in [0, 1, PAGE, 3 * PAGE + 17] {
            let mut block = HostBlock::unlocked(bytes);
            assert!(!block.is_locked() && block.len() == bytes && block.iter().all(|byte| *byte == 0));
            assert!(block.as_ptr().addr().is_multiple_of(PAGE));
            block.fill(7);
            assert!(block.iter().all(|byte| *byte == 7));
        }
    }
}
