//! Damaged files: each opens or gives an error naming the file, without a panic and without a large
//! allocation.
#![allow(unsafe_code)] // a global allocator that counts

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use common::*;
use folio_formats::{Result, WeightSource};
use folio_testing::Rng;

struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged; only sizes are noted beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(held, Relaxed);
        // SAFETY: the caller's promises are passed on unchanged.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promises are passed on unchanged.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn mutate(good: &[u8], header: usize, seed: u64) -> Vec<u8> {
    let pick = |index: u64, below: usize| (Rng::at(seed, index) % below as u64) as usize;
    let mut bytes = good.to_vec();
    match seed % 6 {
        0 => bytes[pick(0, header)] ^= 1 << pick(1, 8),
        1 => (0..4).for_each(|i| bytes[pick(2 * i, header)] = pick(2 * i + 1, 256) as u8),
        // A length or a count becomes huge.
        2 => {
            let at = pick(0, header - 8);
            bytes[at..at + 8].copy_from_slice(&(Rng::at(seed, 1) >> pick(2, 60)).to_le_bytes());
        }
        3 => bytes.truncate(pick(0, good.len())),
        // A few bytes more or fewer move everything behind them.
        4 => drop(bytes.splice(pick(0, header)..pick(0, header), (0..pick(1, 9)).map(|i| i as u8))),
        _ => {
            let at = pick(0, header);
            bytes.drain(at..(at + 1 + pick(1, 9)).min(header));
        }
    }
    bytes
}

/// Opens a damaged file and reads all tensors that it claims to hold.
fn try_all<S: WeightSource>(good: &[u8], header: usize, count: u64, open: fn(Vec<u8>) -> Result<S>) -> u64 {
    let mut refused = 0;
    for seed in 0..count {
        let bytes = mutate(good, header, seed);
        let allowed = HELD.load(Relaxed) + bytes.len() + (16 << 20);
        PEAK.store(HELD.load(Relaxed), Relaxed);
        match open(bytes) {
            Ok(source) => {
                for name in source.names() {
                    let view = source.require(name);
                    let _ = view.and_then(|view| view.to_f32());
                }
            }
            Err(problem) => {
                refused += 1;
                assert!(problem.to_string().starts_with(NAME), "mutation {seed}: {problem}");
            }
        }
        let peak = PEAK.load(Relaxed);
        assert!(peak <= allowed, "mutation {seed}: {peak} bytes held, {allowed} allowed");
    }
    refused
}

#[test]
fn damaged_files_are_errors_not_panics() {
    let gguf = good_gguf();
    let refused = try_all(&gguf, gguf.len() - 32 - 32 - 96, 1200, open_gguf);
    assert!(refused > 600, "only {refused} of 1200 damaged GGUF files were refused");
    let safetensors = good_safetensors();
    let refused = try_all(&safetensors, safetensors.len() - 43, 1200, open_safetensors);
    assert!(refused > 600, "only {refused} of 1200 damaged safetensors files were refused");
}
