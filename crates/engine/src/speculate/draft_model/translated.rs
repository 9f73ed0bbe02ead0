//! A draft model with another vocabulary: its tokens are translated.
//!
//! The two models share a text, and a place in it has another number in each, so the draft model
//! cannot use the decoder's block tables. It has blocks of its own, assigned by request. When they
//! run out, the request that has gone longest without a draft gives up its blocks, and its text is
//! computed again if needed. The rest is done by [`DraftModel`], which gets a step in which
//! requests have the translated tokens and these blocks. If the end of a text translates to other
//! tokens than before, the model notices by comparing tokens and continues from the common prefix.

use std::collections::HashMap;

use folio_device::{BLOCK_TOKENS, Backend, Batch, GroupTables};
use folio_model::{Decoder, OpenModel};
use folio_scheduler::RequestId;

use super::{DraftModel, DraftModelOptions};
use crate::{
    Result,
    speculate::{Draft, Drafter, Settled, SettledRequest},
};

/// One request in the draft model's vocabulary.
pub trait Translation: Send {
    /// Translates more of the request's tokens, which only ever grow. Returns whether all of them
    /// are translated: a long text may take several calls.
    fn follow(&mut self, tokens: &[u32]) -> bool;

    /// The translated tokens; none if there is no translation. The last few may change with the
    /// next call.
    fn tokens(&self) -> &[u32];

    /// Translates drafted tokens back, to at most `most` tokens of the request's vocabulary.
    fn back(&self, drafted: &[u32], most: usize) -> Vec<u32>;
}

/// Makes a translation for a new request.
pub type BeginTranslation = Box<dyn Fn() -> Box<dyn Translation> + Send>;

/// See the [module](self).
pub struct TranslatedModel<B: Backend> {
    model: DraftModel<B>,
    begin: BeginTranslation,
    requests: HashMap<RequestId, Followed>,
    free: Vec<u32>,
    steps: u64,
}

struct Followed {
    translation: Box<dyn Translation>,
    /// Blocks of the draft model's storage that only this request uses.
    table: Vec<u32>,
    /// The step in which the request last used them.
    used: u64,
}

/// A request of a step that the draft model gets.
struct Asking {
    /// Index of the request in the step.
    number: usize,
    /// Most tokens to draft, in the draft model's vocabulary.
    most: usize,
    /// Whether all of the request is translated, so that a draft can be used.
    has_all: bool,
}

impl<B: Backend> TranslatedModel<B> {
    /// Loads a model that drafts for `target`, if [`DraftModel::limits`] has room for
    /// [`stretch`](DraftModelOptions::stretch) times its tokens.
    pub fn load(
        backend: B,
        model: &OpenModel,
        target: &Decoder<B>,
        options: DraftModelOptions,
        begin: BeginTranslation,
    ) -> Result<Self> {
        let model = DraftModel::load_with(backend, model, target, options, model.spec.vocab_size)?;
        let free = (0..model.ahead.first_scratch() as u32).rev().collect();
        Ok(Self { model, begin, requests: HashMap::new(), free, steps: 0 })
    }

    /// Translates new tokens of a request, and assigns blocks to it. None if it has no tokens to
    /// draft after, or no room.
    fn follow(&mut self, number: usize, request: &SettledRequest<'_>) -> Option<Asking> {
        let begin = &self.begin;
        let followed = self.requests.entry(request.id).or_insert_with(|| Followed {
            translation: begin(),
            table: Vec::new(),
            used: 0,
        });
        followed.used = self.steps;
        let has_all = followed.translation.follow(request.tokens);
        let len = followed.translation.tokens().len();
        if len == 0 || len > self.model.decoder.spec().max_context {
            return None;
        }
        let most = if has_all { self.model.options.stretched(request.most) } else { 1 };
        let needed = len.div_ceil(BLOCK_TOKENS);
        if !self.extend(request.id, needed) {
            return None;
        }
        // Drafted tokens need no blocks, but accepted ones in blocks need not be computed again.
        let wanted = (len + most).div_ceil(BLOCK_TOKENS);
        if self.free.len() >= wanted - needed {
            self.extend(request.id, wanted);
        }
        Some(Asking { number, most, has_all })
    }

    /// Extends a request to `needed` blocks, or frees its blocks if there are too few. Returns
    /// whether it has them.
    fn extend(&mut self, id: RequestId, needed: usize) -> bool {
        let idle = self.requests.values().filter(|other| other.used < self.steps);
        let room = self.free.len() + idle.map(|other| other.table.len()).sum::<usize>();
        let missing = needed.saturating_sub(self.requests[&id].table.len());
        while missing <= room && missing > self.free.len() {
            let others = self.requests.values_mut().filter(|other| other.used < self.steps && !other.table.is_empty());
            let oldest = others.min_by_key(|other| other.used).expect("somebody has what is missing");
            self.free.append(&mut oldest.table);
        }
        let Followed { table, .. } = self.requests.get_mut(&id).expect("a request that is followed");
        if missing > room {
            self.free.append(table);
            return false;
        }
        table.extend(self.free.drain(self.free.len() - missing..));
        true
    }
}

impl<B: Backend> Drafter<B> for TranslatedModel<B> {
    fn draft(&mut self, decoder: &mut Decoder<B>, step: &Settled<'_>, drafts: &mut [Draft]) -> Result<()> {
        self.steps += 1;
        let asking = step.requests.iter().enumerate().filter(|(_, request)| request.most > 0);
        let mut asking: Vec<Asking> = asking.filter_map(|(number, request)| self.follow(number, request)).collect();
        let mut room = self.model.decoder.limits().table_entries - self.model.ahead.table_entries(0);
        asking.retain(|asking| {
            let left = room.checked_sub(self.requests[&step.requests[asking.number].id].table.len());
            room = left.unwrap_or(room);
            left.is_some()
        });

        let mut tables = GroupTables::default();
        let mut requests = Vec::with_capacity(asking.len());
        for &Asking { number, most, .. } in &asking {
            let SettledRequest { id, owner, .. } = step.requests[number];
            let Followed { translation, table, .. } = &self.requests[&id];
            tables.first_block.push(tables.blocks.len() as u32);
            tables.blocks.extend(table);
            let tokens = translation.tokens();
            requests.push(SettledRequest {
                id,
                owner,
                tokens,
                computed: 0,
                rows: &[],
                output: None,
                guesses: &[],
                most,
            });
        }
        let mut batch = Batch { groups: vec![GroupTables::default(); self.model.ahead.group()], ..Batch::default() };
        batch.groups.push(tables);
        let mut drafted = vec![Draft::default(); requests.len()];
        self.model.draft(decoder, &Settled { batch: &batch, requests: &requests }, &mut drafted)?;

        let num_known = decoder.spec().vocab_size;
        for (asking, drafted) in asking.iter().zip(&drafted).filter(|(asking, _)| asking.has_all) {
            let request = &step.requests[asking.number];
            let tokens = self.requests[&request.id].translation.back(drafted.tokens(), request.most);
            drafts[asking.number] = Draft::chain(tokens.into_iter().take_while(|&token| (token as usize) < num_known));
        }
        Ok(())
    }

    fn reads_step(&self) -> bool {
        true
    }

    fn forget(&mut self, id: RequestId) {
        if let Some(followed) = self.requests.remove(&id) {
            self.free.extend(followed.table);
        }
    }
}
