//! The host tier: evicted blocks whose copy back to the device costs less than computing them
//! again.

use super::{
    Blocks,
    nodes::NodeId,
    pool::{Filling, Sealed},
};
use crate::{BlockId, HostSlot, Medium, Transfer};

impl Blocks {
    /// Saves the content of `block` before it is overwritten, if that pays and a slot can be had.
    pub(super) fn save(&mut self, group: usize, node: NodeId, block: BlockId) {
        if !self.copying_pays || self.nodes.place(node, group).host.is_some() {
            return;
        }
        let Some(slot) = self.take_host(group) else { return };
        let slot = self.save_to(group, node, block, slot);
        self.groups[group].host.release(slot);
    }

    /// Adds a transfer of `block` to `slot`, where `node` is found from now on.
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

    /// The next host slot in order of eviction; its content is forgotten.
    pub(super) fn take_host(&mut self, group: usize) -> Option<Filling> {
        let (slot, node) = self.groups[group].host.take()?;
        if let Some(node) = node {
            self.events.removed(self.nodes.hash(node), Medium::Host, group);
            self.nodes.set_host(node, group, None);
        }
        Some(slot)
    }

    /// Loads `node`, which the caller holds, into a device block; its slot becomes the last in
    /// order of eviction.
    pub(super) fn load(&mut self, group: usize, slot: Sealed, node: NodeId) -> Sealed {
        let block = self.take(group).expect("free blocks were counted");
        self.transfers.push(Transfer::Load { group, from: HostSlot(slot.id().0), to: block.id() });
        self.groups[group].host.release(slot);
        self.publish(group, block.id(), node);
        self.groups[group].pool.seal(block, Some(node))
    }
}
