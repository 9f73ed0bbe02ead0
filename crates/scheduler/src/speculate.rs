//! Drafts: what may follow a request's last token, verified in the step that computes it.
//!
//! The nodes of a tree take the slots behind the last token, one each, whatever their depth. Those lie in blocks that the
//! request fills itself, so that nobody else reads them. When the result comes, the accepted path lies where a chain
//! would have put it, and blocks behind it are given back. A guess is worth less than anything that is known: drafts get
//! what prompts and newcomers left of a step, and no block that somebody will need soon.

use crate::{Draft, RequestId, Scheduler, Whereabouts, step::Step};

impl Scheduler {
    /// Tokens to verify behind a request's last one in the next step, instead of earlier ones. False, and ignored, unless
    /// the request runs, has nothing in flight and nothing but its last token to compute. A tree may be cut short, by its
    /// last nodes.
    pub fn draft(&mut self, id: RequestId, mut drafts: Draft) -> bool {
        let Some(index) = self.running_index(id) else { return false };
        let request = &mut self.running[index];
        if !request.flights.is_empty() || !request.is_decoding() {
            return false;
        }
        // Room for a token behind them; and more slots than its longest sequence needs it never holds.
        drafts.truncate(request.max_len - 1 - request.tokens.len().min(request.max_len - 1));
        request.drafts = drafts;
        true
    }

    /// Whether somebody drafts for a request: then it is not planned ahead of its result, as nothing could be verified
    /// behind a token that is still under way. Forgotten with the request, not with its blocks.
    pub fn expect_drafts(&mut self, id: RequestId, expected: bool) {
        let Some(&Whereabouts { tenant, key, .. }) = self.known.get(&id) else { return };
        match self.running_index(id) {
            Some(index) => self.running[index].expects_drafts = expected,
            None => {
                self.waiting.change(tenant, key, |request| request.expects_drafts = expected);
            }
        }
    }

    /// Gives drafts a place behind their requests' rows, in line, as far as tokens and blocks are left. The rest of them
    /// is dropped: the next token makes them stale.
    pub(crate) fn allot_drafts(&mut self, step: &mut Step) {
        for index in 0..self.running.len() {
            let request = &self.running[index];
            // Nothing has changed for a request that got no row: it keeps its drafts.
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

    /// For how many of `wanted` drafts a request has slots: in the blocks that it holds, and with those that it may take.
    fn room_for_drafts(&self, index: usize, wanted: usize, step: &mut Step) -> (usize, usize) {
        let request = &self.running[index];
        let end = request.planned + request.chunk;
        let slots = request.tables[0].num_blocks() * self.config.block_tokens;
        let held = wanted.min(slots - end);
        // Blocks that come back only with the step's result must not be what others wait for.
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
