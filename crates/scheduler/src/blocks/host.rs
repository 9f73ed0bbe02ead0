//! The host tier: blocks that had to leave the device, kept where copying them back takes less than computing them again.

use super::{
    Blocks,
    nodes::NodeId,
    pool::{Filling, Sealed},
};
use crate::{BlockId, HostSlot, Medium, Transfer};

impl Blocks {
    /// Keeps the content of `block`, which is about to be overwritten, if that pays and there is a place for it.
    pub(super) fn save(&mut self, group: usize, node: NodeId, block: BlockId) {
        if !self.copying_pays || self.nodes.place(node, group).host.is_some() {
            return;
        }
        let Some(slot) = self.take_host(group) else { return };
        let slot = self.save_to(group, node, block, slot);
        self.groups[group].host.release(slot);
    }

    /// Writes `block` down to be copied to `slot`, where `node` is found from now on.
    pub(super) fn save_to(&mut self, group: usize, node: NodeId, block: BlockId, slot: Filling) -> Sealed {
        self.transfers.push(Transfer::Save { group, from: block, to: HostSlot(slot.id().0) });
        self.publish_host(group, node, slot)
    }

    pub(super) fn publish_host(&mut self, group: usize, node: NodeId, slot: Filling) -> Sealed {
        self.groups[group].host.publish(slot.id(), node);
        self.nodes.set_host(node, group, Some(HostSlot(slot.id().0)));
        self.events.stored(&self.nodes, node, Medium::Host, group);
        self.groups[group].host.seal(slot, None)
    }

    /// The host slot that is missed least; what it held is forgotten.
    pub(super) fn take_host(&mut self, group: usize) -> Option<Filling> {
        let (slot, node) = self.groups[group].host.take()?;
        if let Some(node) = node {
            self.events.removed(self.nodes.hash(node), Medium::Host, group);
            self.nodes.set_host(node, group, None);
        }
        Some(slot)
    }

    /// Brings `node`, for which the caller has a hold, back to the device; its slot becomes the last to be taken.
    pub(super) fn load(&mut self, group: usize, slot: Sealed, node: NodeId) -> Sealed {
        let block = self.take(group).expect("free blocks were counted");
        self.transfers.push(Transfer::Load { group, from: HostSlot(slot.id().0), to: block.id() });
        self.groups[group].host.release(slot);
        self.publish(group, block.id(), node);
        self.groups[group].pool.seal(block, Some(node))
    }
}
