//! Blocks that move between the device and the host tier while steps go on.
//!
//! A slot's memory is with the device for as long as its copy lasts. It is back before the step that asked for the copy is
//! told of, since the slot may belong to a disk task from then on.

use std::{collections::VecDeque, sync::Arc};

use folio_device::{Backend, HostMemory};
use folio_model::Decoder;
use folio_scheduler::{HostSlot, Transfer};

use crate::{Error, HostTier, Result};

pub(crate) struct Moves {
    host: Option<Arc<HostTier>>,
    /// Copies that go on by themselves, oldest first.
    under_way: VecDeque<Move>,
}

struct Move {
    /// The number of the step that asked for it.
    step: u64,
    group: usize,
    slot: HostSlot,
}

impl Moves {
    pub fn new(host: Option<Arc<HostTier>>) -> Self {
        Self { host, under_way: VecDeque::new() }
    }

    /// Begins transfers in their order.
    pub fn start<B: Backend>(&mut self, decoder: &mut Decoder<B>, transfers: &[Transfer], step: u64) -> Result<()> {
        for transfer in transfers {
            let (group, slot, done) = match *transfer {
                Transfer::Copy { group, from, to } => {
                    decoder.copy_blocks(group, &[(from.0, to.0)]);
                    continue;
                }
                Transfer::Save { group, from, to } => {
                    let memory = self.take(decoder, group, to)?;
                    (group, to, decoder.start_save(group, from.0, memory))
                }
                Transfer::Load { group, from, to } => {
                    let memory = self.take(decoder, group, from)?;
                    (group, from, decoder.start_load(group, to.0, memory))
                }
            };
            match done {
                Some(memory) => self.host()?.put_back(group, slot, memory),
                None => self.under_way.push_back(Move { step, group, slot }),
            }
        }
        Ok(())
    }

    /// Waits for the copies of this step and of those before it.
    pub fn finish<B: Backend>(&mut self, decoder: &mut Decoder<B>, step: u64) {
        while self.under_way.front().is_some_and(|copy| copy.step <= step) {
            self.finish_oldest(decoder);
        }
    }

    /// A slot's memory, when the copy before that uses it is done.
    fn take<B: Backend>(
        &mut self,
        decoder: &mut Decoder<B>,
        group: usize,
        slot: HostSlot,
    ) -> Result<Box<dyn HostMemory>> {
        while self.under_way.iter().any(|copy| (copy.group, copy.slot) == (group, slot)) {
            self.finish_oldest(decoder);
        }
        Ok(self.host()?.take(group, slot))
    }

    fn finish_oldest<B: Backend>(&mut self, decoder: &mut Decoder<B>) {
        if let (Some(Move { group, slot, .. }), Some(host)) = (self.under_way.pop_front(), &self.host) {
            host.put_back(group, slot, decoder.moved());
        }
    }

    fn host(&self) -> Result<&HostTier> {
        self.host.as_deref().ok_or(Error::NoHostTier)
    }
}
