//! Recorded steps, of tokens that are decoded and drafts that are verified: the first step of a size and form runs as it is
//! asked for, the second is recorded, all others are replayed. A recording that fails ends in an error of its step, and
//! that size is never recorded again.

use std::collections::HashMap;

use super::driver::{Device, Graph};
use super::inputs::{Form, Inputs};
use crate::Result;

/// What a recording depends on: the inputs' memory, the size of the step, and which kernels attend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    inputs: u64,
    rows: usize,
    num_logits: usize,
    form: Form,
}

#[derive(Default)]
enum Entry {
    #[default]
    Unseen,
    SeenOnce,
    Ready(Graph),
    Refused,
}

#[derive(Default)]
pub(super) struct Graphs {
    entries: HashMap<Key, Entry>,
    /// Under way.
    recording: Option<Key>,
}

impl Graphs {
    /// False: the step was replayed.
    pub fn begin(&mut self, device: &Device, inputs: &Inputs, num_logits: usize) -> bool {
        let size = inputs.size();
        // Pooled rows have no logits; prompt chunks have a length of their own.
        if !inputs.decodes() || num_logits != size.outputs {
            return true;
        }
        let key = Key { inputs: inputs.tokens(), rows: size.rows, num_logits, form: inputs.form() };
        let entry = self.entries.entry(key).or_default();
        match entry {
            Entry::Ready(graph) => {
                device.launch_graph(graph);
                return false;
            }
            Entry::Unseen => *entry = Entry::SeenOnce,
            Entry::SeenOnce => match device.begin_capture() {
                Ok(()) => self.recording = Some(key),
                Err(_) => *entry = Entry::Refused,
            },
            Entry::Refused => {}
        }
        true
    }

    pub fn end(&mut self, device: &Device) -> Result<()> {
        let Some(key) = self.recording.take() else { return Ok(()) };
        match device.end_capture() {
            Ok(graph) => {
                device.launch_graph(&graph);
                self.entries.insert(key, Entry::Ready(graph));
                Ok(())
            }
            Err(error) => {
                self.entries.insert(key, Entry::Refused);
                Err(error)
            }
        }
    }

    /// Sizes that are replayed by now.
    pub fn recorded(&self) -> usize {
        self.entries.values().filter(|entry| matches!(entry, Entry::Ready(_))).count()
    }
}
