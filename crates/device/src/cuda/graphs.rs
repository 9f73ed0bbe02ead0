//! Recorded work: steps that decode tokens or verify drafts, and the sampling behind them. The
//! first piece of work of a kind is launched operation by operation, the second is recorded, all
//! others are replayed. A failed recording is an error of its step, and that kind is never recorded
//! again.

use std::collections::HashMap;
use std::hash::Hash;

use super::driver::{Device, Graph};
use super::inputs::{Form, Inputs};
use crate::{Error, Result};

/// Most kinds; work of further kinds is launched operation by operation.
const MOST_KINDS: usize = 2048;

/// Key of a step's recording: the inputs' memory, the size of the step, and its attention kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct StepKind {
    inputs: u64,
    rows: usize,
    num_logits: usize,
    form: Form,
}

impl StepKind {
    /// None for steps that hardly come twice: each prompt chunk has its own length, and pooled rows
    /// have no logits.
    pub fn of(inputs: &Inputs, num_logits: usize) -> Option<StepKind> {
        let size = inputs.size();
        let kind = StepKind { inputs: inputs.tokens(), rows: size.rows, num_logits, form: inputs.form() };
        (inputs.decodes() && num_logits == size.outputs).then_some(kind)
    }
}

#[derive(Default)]
enum Entry {
    #[default]
    Unseen,
    SeenOnce,
    /// A recording in pieces, launched one after the other.
    Ready(Vec<Graph>),
    Refused,
}

/// Recordings of work with a kind of type `K`: work of equal kinds has the same launches with the
/// same arguments.
pub(super) struct Recordings<K> {
    entries: HashMap<K, Entry>,
    /// The current recording, with its finished pieces.
    recording: Option<(K, Vec<Graph>)>,
    /// Error of a recording that ended before its work did.
    failure: Option<Error>,
}

impl<K> Default for Recordings<K> {
    fn default() -> Self {
        Self { entries: HashMap::new(), recording: None, failure: None }
    }
}

impl<K: Copy + Eq + Hash> Recordings<K> {
    /// Begins work of a kind; false if a recording was replayed instead.
    pub fn begin(&mut self, device: &Device, kind: K) -> bool {
        if self.entries.len() >= MOST_KINDS && !self.entries.contains_key(&kind) {
            return true;
        }
        let entry = self.entries.entry(kind).or_default();
        match entry {
            Entry::Ready(pieces) => {
                pieces.iter().for_each(|piece| device.launch_graph(piece));
                return false;
            }
            Entry::Unseen => *entry = Entry::SeenOnce,
            Entry::SeenOnce => match device.begin_capture() {
                Ok(()) => self.recording = Some((kind, Vec::new())),
                Err(_) => *entry = Entry::Refused,
            },
            Entry::Refused => {}
        }
        true
    }

    /// The first piece of a recording ends here: the device begins with it while the driver, which
    /// takes longer for the rest, launches that.
    pub fn first_piece_ends(&mut self, device: &Device) {
        let Some((kind, pieces)) = self.recording.as_mut().filter(|(_, pieces)| pieces.is_empty()) else { return };
        match device.end_capture().and_then(|piece| device.begin_capture().map(|()| piece)) {
            Ok(piece) => pieces.push(piece),
            Err(error) => {
                self.entries.insert(*kind, Entry::Refused);
                (self.recording, self.failure) = (None, Some(error));
            }
        }
    }

    pub fn end(&mut self, device: &Device) -> Result<()> {
        if let Some(error) = self.failure.take() {
            return Err(error);
        }
        let Some((kind, mut pieces)) = self.recording.take() else { return Ok(()) };
        match device.end_capture() {
            Ok(piece) => {
                pieces.push(piece);
                pieces.iter().for_each(|piece| device.launch_graph(piece));
                self.entries.insert(kind, Entry::Ready(pieces));
                Ok(())
            }
            Err(error) => {
                self.entries.insert(kind, Entry::Refused);
                Err(error)
            }
        }
    }

    /// Ends a recording of work that was given up, so that the stream runs its work again.
    pub fn abandon(&mut self, device: &Device) {
        self.failure = None;
        if let Some((kind, _)) = self.recording.take() {
            // Neither its graph nor its error is needed.
            let _ = device.end_capture();
            self.entries.insert(kind, Entry::Refused);
        }
    }

    /// Number of kinds that are replayed.
    pub fn recorded(&self) -> usize {
        self.entries.values().filter(|entry| matches!(entry, Entry::Ready(_))).count()
    }
}
