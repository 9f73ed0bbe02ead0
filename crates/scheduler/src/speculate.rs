//! Drafts: tokens that may follow a request's last one, verified in the step that computes it.
//!
//! The nodes of a tree take the slots after the last token, one each, whatever their depth. These
//! slots are in blocks that the request fills itself, so no other request reads them. When the
//! result is committed, the accepted path is where a chain would have put it, and blocks after it
//! are freed. A draft is worth less than a known token: drafts get the rows that prompts and
//! admission leave over, and no block that another request will need soon.

use crate::{Draft, RequestId, Scheduler, Whereabouts, step::Step};

impl Scheduler {
    /// Sets the draft to verify after a request's last token in the next step, in place of an
    /// earlier one. Returns false, and ignores the draft, unless the request runs, has no step in
    /// flight and has only its last token to compute. A tree may be cut short, by its last nodes.
    pub fn draft(&mut self, id: RequestId, mut drafts: Draft) -> bool {
        let Some(index) = self.running_index(id) else { return false };
        let request = &mut self.running[index];
        if !request.flights.is_empty() || !request.is_decoding() {
            return false;
        }
        // A token must fit after the drafts, and they take no more slots than the longest sequence.
        drafts.truncate(request.max_len - 1 - request.tokens.len().min(request.max_len - 1));
        request.drafts = drafts;
        true
    }

    /// Sets whether a draft may come for a request. If so, no step is planned ahead of its result,
    /// because nothing could be verified after a token that is in flight. The setting ends with the
    /// request, not with its blocks.
    pub fn expect_drafts(&mut self, id: RequestId, expected: bool) {
        let Some(&Whereabouts { tenant, key, .. }) = self.known.get(&id) else { return };
        match self.running_index(id) {
            Some(index) => self.running[index].expects_drafts = expected,
            None => {
                self.waiting.change(tenant, key, |request| request.expects_drafts = expected);
            }
        }
    }

    /// Gives drafts rows after those of their requests, in order, while rows and blocks are left.
    /// Drafts without a row are dropped, since the next token makes them stale.
    pub(crate) fn allot_drafts(&mut self, step: &mut Step) {
        for index in 0..self.running.len() {
            let request = &self.running[index];
            // A request without a row in this step has no new token: it keeps its draft.
            if request.drafts.is_empty() || request.chunk == 0 {
                continue;
            }
            let wanted = request.drafts.len().min(step.tokens_left).min(self.max_chunk() - request.chunk);
            let (held, room) = self.room_for_drafts(index, wanted, step);
            let Self { running, blocks, waiting, .. } = self;
            let request = &mut running[index];
            let end = request.planned + request.chunk;
            let fits = room <= held || blocks.grow(&mut request.tables, end + room);
            let granted = if fits { room } else { held };
            request.drafts.truncate(granted);
            step.give(request, granted);
            waiting.charge(request.tenant, granted);
        }
    }

    /// The number of drafts, at most `wanted`, for which a request has slots in its blocks or can
    /// take free ones.
    fn room_for_drafts(&self, index: usize, wanted: usize, step: &mut Step) -> (usize, usize) {
        let request = &self.running[index];
        let end = request.planned + request.chunk;
        let slots = request.tables[0].num_blocks() * self.config.block_tokens;
        let held = wanted.min(slots - end);
        // Blocks that are freed only with the step's result must not be those that others wait for.
        if held == wanted || step.is_short {
            return (held, held);
        }
        let crowd = step.crowd.get_or_insert_with(|| self.crowd());
        let spare = |(group, at): (usize, &crate::blocks::Group)| {
            let others = crowd.headroom[group].saturating_sub(self.still_needs(request, group));
            at.pool.num_free().saturating_sub(others)
        };
        let spare = self.blocks.groups.iter().enumerate().map(spare).min().unwrap_or(0);
        (held, wanted.min(slots - end + spare * self.config.block_tokens))
    }
}
