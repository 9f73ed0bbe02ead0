//! Transfers of blocks between the device and the host tier, while steps run.
//!
//! A slot's memory belongs to the device until its copy is done. It is returned before the results
//! of the step that asked for the copy, because a disk task may use the slot from then on.

use std::{collections::VecDeque, sync::Arc};

use folio_device::{Backend, HostMemory};
use folio_model::Decoder;
use folio_scheduler::{HostSlot, Transfer};

use crate::{Error, HostTier, Result};

pub(super) struct BlockTransfers {
    host: Option<Arc<HostTier>>,
    /// Copies that the device has not finished, oldest first.
    in_flight: VecDeque<HostCopy>,
}

struct HostCopy {
    /// Number of the step that asked for it.
    step: u64,
    group: usize,
    slot: HostSlot,
}

impl BlockTransfers {
    pub fn new(host: Option<Arc<HostTier>>) -> Self {
        Self { host, in_flight: VecDeque::new() }
    }

    /// Starts transfers in order.
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
                None => self.in_flight.push_back(HostCopy { step, group, slot }),
            }
        }
        Ok(())
    }

    /// Waits for the copies of this step and of those before it.
    pub fn finish<B: Backend>(&mut self, decoder: &mut Decoder<B>, step: u64) {
        while self.in_flight.front().is_some_and(|copy| copy.step <= step) {
            self.finish_oldest(decoder);
        }
    }

    /// Takes a slot's memory, after an earlier copy that uses it.
    fn take<B: Backend>(
        &mut self,
        decoder: &mut Decoder<B>,
        group: usize,
        slot: HostSlot,
    ) -> Result<Box<dyn HostMemory>> {
        while self.in_flight.iter().any(|copy| (copy.group, copy.slot) == (group, slot)) {
            self.finish_oldest(decoder);
        }
        Ok(self.host()?.take(group, slot))
    }

    fn finish_oldest<B: Backend>(&mut self, decoder: &mut Decoder<B>) {
        if let (Some(HostCopy { group, slot, .. }), Some(host)) = (self.in_flight.pop_front(), &self.host) {
            host.put_back(group, slot, decoder.moved());
        }
    }

    fn host(&self) -> Result<&HostTier> {
        self.host.as_deref().ok_or(Error::NoHostTier)
    }
}
