//! A name for everything that the bits of keys and values depend on, so that stored blocks are
//! found only by a process that would have computed the same.
//!
//! It covers the spec, every tensor's name, shape, format and contents, the storage format and
//! layout of blocks, the device's kernels, and a probe: the bits of one block as this very process
//! computes them. Weights are hashed whole up to [`WHOLE_BYTES`]. In larger ones, tensors of up to
//! [`SMALL_BYTES`] are hashed whole and others by some pages each, together with the caller's
//! [`file_stamp`] of the files (names, sizes and times). One case is not covered: a large file
//! edited in place to the same size with its time set back, in pages that are not sampled, in a way
//! that does not change the probe, such as the embedding of a token or an expert that the probe
//! does not use.

use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use folio_device::{BLOCK_TOKENS, Backend, Batch, GroupTables, Span};
use folio_formats::TensorView;

use crate::{Decoder, Digest, ModelSpec, OpenModel, Result};

/// Raised when the meaning of a fingerprint or the layout of a block's bytes changes in a way the
/// probe may not show.
const VERSION: u64 = 2;
/// Most bytes of weights that are hashed whole: about 20 ms on two cores.
pub const WHOLE_BYTES: usize = 256 << 20;
/// Largest tensor that is hashed whole in larger weights.
pub const SMALL_BYTES: usize = 64 << 10;
const PAGE: usize = 4 << 10;
const MOST_THREADS: usize = 8;
/// Pages read from large weights, shared among their tensors.
const PAGES: usize = 8192;

/// Equal for two processes only if they compute the same keys and values for the same tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub u128);

/// As 32 hexadecimal digits.
impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl<B: Backend> Decoder<B> {
    /// Computes one block of the device's storage in every layer group, so it must run before the
    /// first real step. `model` is the source of this decoder; `stamp` is its [`file_stamp`], or
    /// empty without a file.
    pub fn fingerprint(&mut self, model: &OpenModel, stamp: &str) -> Result<Fingerprint> {
        let mut digest = Digest::new("folio kv");
        digest.update(&VERSION.to_le_bytes());
        digest.field(self.backend().numerics().as_bytes());
        digest.field(format!("{:?} {BLOCK_TOKENS}", self.limits().kv_format).as_bytes());
        digest.field(spec_text(self.spec()).as_bytes());
        hash_weights(&mut digest, model, stamp, WHOLE_BYTES);
        model.weights.check()?;
        self.hash_probe(&mut digest)?;
        Ok(Fingerprint(digest.finish()))
    }

    /// The bits of one block of tokens from all over the vocabulary.
    fn hash_probe(&mut self, digest: &mut Digest) -> Result<()> {
        // A shorter context has no full block that could be cached.
        if self.spec().max_context < BLOCK_TOKENS {
            return Ok(());
        }
        let groups = self.limits().blocks.len();
        let last = self.spec().vocab_size.saturating_sub(1);
        let tokens: Vec<u32> = (0..BLOCK_TOKENS).map(|i| (i * last / (BLOCK_TOKENS - 1)) as u32).collect();
        for first in (0..BLOCK_TOKENS).step_by(self.limits().rows.clamp(1, BLOCK_TOKENS)) {
            let end = (first + self.limits().rows).min(BLOCK_TOKENS);
            self.forward(&probe_step(&tokens[first..end], first, groups))?;
        }
        for group in 0..groups {
            let mut block = vec![0; self.block_bytes(group)];
            self.save_block(group, 0, &mut block);
            digest.field(&block);
        }
        Ok(())
    }
}

fn probe_step(tokens: &[u32], first: usize, groups: usize) -> Batch {
    let context = (first + tokens.len()) as u32;
    let positions: Vec<u32> = (first as u32..context).collect();
    let tables = GroupTables { slots: positions.clone(), blocks: vec![0], first_block: vec![0] };
    Batch {
        tokens: tokens.to_vec(),
        spans: vec![Span { first_row: 0, num_rows: tokens.len() as u32, context }],
        ancestors: Vec::new(),
        groups: vec![tables; groups],
        outputs: Vec::new(),
        positions,
    }
}

/// The spec without the parts that keys and values do not depend on: the computation of logits, and
/// the longest sequence (its consequences are in the rotary embeddings).
fn spec_text(spec: &ModelSpec) -> String {
    let counted =
        ModelSpec { max_context: 0, tied_head: false, logit_scale: 1.0, logit_soft_cap: None, ..spec.clone() };
    format!("{counted:?}")
}

pub(crate) fn hash_weights(digest: &mut Digest, model: &OpenModel, stamp: &str, whole_bytes: usize) {
    let weights = &*model.weights;
    let mut names = weights.names();
    names.sort_unstable();
    let tensors: Vec<TensorView<'_>> = names.into_iter().filter_map(|name| weights.tensor(name)).collect();
    let total = tensors.iter().fold(0usize, |sum, tensor| sum.saturating_add(tensor.bytes.len()));
    let is_whole = total <= whole_bytes;
    digest.field(if is_whole { "" } else { stamp }.as_bytes());
    let pages = (PAGES / tensors.len().max(1)).clamp(2, SMALL_BYTES / PAGE);
    let hash_one = |tensor: &TensorView<'_>| {
        let mut digest = Digest::new("tensor");
        digest.field(tensor.name.as_bytes());
        digest.field(format!("{:?} {:?}", tensor.format, tensor.shape).as_bytes());
        if is_whole || tensor.bytes.len() <= SMALL_BYTES {
            digest.field(tensor.bytes);
        } else {
            hash_pages(&mut digest, tensor.bytes, pages);
        }
        weights.release(tensor.name);
        digest.finish()
    };
    for tensor in in_parallel(&tensors, hash_one) {
        digest.update(&tensor.to_le_bytes());
    }
}

/// One result per item, in order. Most of the time goes into the system's mapping of pages, which
/// threads share well.
fn in_parallel<T: Sync>(items: &[T], run: impl Fn(&T) -> u128 + Sync) -> Vec<u128> {
    let next = AtomicUsize::new(0);
    let work = || -> Vec<(usize, u128)> {
        let take = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&at| at < items.len());
        std::iter::from_fn(take).map(|at| (at, run(&items[at]))).collect()
    };
    let helpers = std::thread::available_parallelism().map_or(1, usize::from).clamp(1, MOST_THREADS) - 1;
    let mut found = std::thread::scope(|scope| {
        // If the system refuses a thread, the others take its share.
        let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, work).ok();
        let threads: Vec<_> = (0..helpers).filter_map(spawn).collect();
        let mut found = work();
        for thread in threads {
            found.extend(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        found
    });
    found.sort_unstable_by_key(|&(at, _)| at);
    found.into_iter().map(|(_, digest)| digest).collect()
}

/// `pages` pages at equal distances, the first and the last among them.
fn hash_pages(digest: &mut Digest, bytes: &[u8], pages: usize) {
    digest.update(&(bytes.len() as u64).to_le_bytes());
    let last = bytes.len() - PAGE;
    for page in 0..pages {
        let at = (last as u128 * page as u128 / (pages - 1) as u128) as usize;
        digest.update(&bytes[at..at + PAGE]);
    }
}

/// Names, sizes and times of the weight files at `path`: one file, or those in a model folder. A
/// path that cannot be read has an empty stamp.
pub fn file_stamp(path: &Path) -> String {
    let mut files = match std::fs::read_dir(path) {
        Ok(entries) => entries.flatten().map(|entry| entry.path()).collect(),
        Err(_) => vec![path.to_owned()],
    };
    files.retain(|file| file.extension().is_some_and(|ending| ending == "safetensors" || ending == "gguf"));
    files.sort_unstable();
    let stamp = |file: &Path| {
        // Followed through links: folders of downloaded models consist of links.
        let about = std::fs::metadata(file).ok()?;
        let modified = about.modified().ok()?.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Some(format!("{} {} {}\n", file.file_name()?.to_string_lossy(), about.len(), modified.as_nanos()))
    };
    files.iter().filter_map(|file| stamp(file)).collect()
}
