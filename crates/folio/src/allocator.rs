//! The allocator of the process, which returns memory to the system as soon as it is free.
//!
//! The system's allocator keeps the memory of large request bodies, in one arena for each thread.
//! mimalloc returns it, but by default only at some later allocation, after a second, and in huge
//! pages: an idle server would keep it. Buffers that kernels stream through are mappings of their
//! own on huge pages, and are not allocated here.

#![allow(unsafe_code)]

use libmimalloc_sys::{mi_option_set, mi_option_t};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// `mi_option_purge_delay` of mimalloc's header: milliseconds until free memory goes back to the
/// system.
const PURGE_DELAY: mi_option_t = 15;

/// Returns free memory to the system without delay. Called once, before anything large is
/// allocated.
pub fn give_back_at_once() {
    // SAFETY: the option exists in the linked version (3) of mimalloc, and setting it is an atomic
    // store.
    unsafe { mi_option_set(PURGE_DELAY, 0) };
}
