//! A minimal runner: steps of a decoder, drafts verified greedily, and block allocation.

use std::sync::atomic::{AtomicU64, Ordering};

use folio_device::{BLOCK_TOKENS, Backend, Batch, GroupTables, KvFormat, Span};
use folio_engine::{
    RequestId,
    speculate::{Draft, DraftModel, DraftModelOptions, Drafter, Owner, Settled, SettledRequest},
};
use folio_model::{Decoder, DecoderLimits, OpenModel};

pub struct Request {
    pub id: RequestId,
    pub tokens: Vec<u32>,
    /// Number of them that the target has computed.
    pub computed: usize,
    pub table: Vec<u32>,
    pub most: usize,
    draft: Draft,
}

impl Request {
    pub fn new(prompt: &[u32], most: usize) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let id = RequestId(NUMBER.fetch_add(1, Ordering::Relaxed));
        Self { id, tokens: prompt.to_vec(), computed: 0, table: Vec::new(), most, draft: Draft::default() }
    }

    /// Another request, which found the first blocks of this one in the cache.
    pub fn with_prefix_of(other: &Request, prompt: &[u32], most: usize) -> Self {
        let same = other.tokens[..other.computed].iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let blocks = same.min(prompt.len() - 1) / BLOCK_TOKENS;
        let table = other.table[..blocks].to_vec();
        Self { computed: blocks * BLOCK_TOKENS, table, ..Self::new(prompt, most) }
    }
}

/// Counts of drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Steps in which a request was to have a draft from the step before.
    pub asked: usize,
    pub drafted: usize,
    pub accepted: usize,
    pub put_out: usize,
    pub steps: usize,
}

pub struct Driver<B: Backend> {
    pub target: Decoder<B>,
    pub draft: Box<dyn Drafter<B>>,
    pub free: Vec<u32>,
    pub count: Count,
    /// Rows of a prompt in one step.
    pub chunk: usize,
}

impl<B: Backend> Driver<B> {
    pub fn new(
        backends: [B; 2],
        models: [&OpenModel; 2],
        blocks: usize,
        options: DraftModelOptions,
    ) -> folio_engine::Result<Self> {
        let [target, draft] = backends;
        Self::with(target, models[0], blocks, |target| {
            Ok(Box::new(DraftModel::load(draft, models[1], target, options)?))
        })
    }

    /// With any drafting method.
    pub fn with(
        backend: B,
        model: &OpenModel,
        blocks: usize,
        drafter: impl FnOnce(&Decoder<B>) -> folio_engine::Result<Box<dyn Drafter<B>>>,
    ) -> folio_engine::Result<Self> {
        let limits = DecoderLimits {
            rows: 256,
            spans: 8,
            outputs: 256,
            table_entries: 8 * blocks,
            blocks: vec![blocks; model.spec.kv_groups().len()],
            kv_format: KvFormat::F32,
        };
        let target = Decoder::load(backend, model, limits, &mut |_| ())?;
        let draft = drafter(&target)?;
        // In no order: reading straight through must not work by chance.
        let free = (0..blocks as u32).map(|block| block * 7 % blocks as u32).collect();
        Ok(Self { target, draft, free, count: Count::default(), chunk: 64 })
    }

    /// One step of these requests, and the drafts for the next.
    pub fn step(&mut self, requests: &mut [&mut Request]) {
        let batch = self.gather(requests);
        self.target.forward(&batch).expect("a step");
        let mut logits = Vec::new();
        self.target.logits(&mut logits);
        let mut best = logits.chunks_exact(self.target.spec().vocab_size).map(best);
        self.count.steps += 1;
        let mut rows: Vec<Vec<u32>> = Vec::new();
        for (request, span) in requests.iter_mut().zip(&batch.spans) {
            let known = span.num_rows - request.draft.len() as u32;
            let mut taken: Vec<u32> = (span.first_row..span.first_row + known).collect();
            let is_last = request.computed + known as usize == request.tokens.len();
            request.computed += known as usize;
            if is_last {
                let draft = std::mem::take(&mut request.draft);
                let given: Vec<u32> = best.by_ref().take(draft.len() + 1).collect();
                let hits = draft.tokens().iter().zip(&given).take_while(|(drafted, given)| drafted == given).count();
                taken.extend((0..hits as u32).map(|hit| span.first_row + known + hit));
                request.tokens.extend(&given[..=hits]);
                request.computed += hits;
                self.count.drafted += draft.len();
                self.count.accepted += hits;
                self.count.put_out += hits + 1;
            }
            rows.push(taken);
        }
        let settled = requests.iter().zip(&rows).map(|(request, rows)| SettledRequest {
            id: request.id,
            owner: Owner::default(),
            tokens: &request.tokens,
            computed: request.computed,
            rows,
            output: None,
            guesses: &[],
            most: if request.computed + 1 == request.tokens.len() { request.most } else { 0 },
        });
        let settled: Vec<_> = settled.collect();
        self.count.asked += settled.iter().filter(|request| request.most > 0).count();
        let mut drafts = vec![Draft::default(); requests.len()];
        let step = Settled { batch: &batch, requests: &settled };
        self.draft.draft(&mut self.target, &step, &mut drafts).expect("drafts");
        for (request, draft) in requests.iter_mut().zip(drafts) {
            assert!(draft.len() <= request.most && draft.is_chain());
            request.draft = draft;
        }
    }

    /// Frees a request's blocks; all its tokens are computed again.
    pub fn preempt(&mut self, request: &mut Request) {
        request.draft.clear();
        request.computed = 0;
        self.free.append(&mut request.table);
    }

    fn gather(&mut self, requests: &mut [&mut Request]) -> Batch {
        let groups = self.target.limits().blocks.len();
        let mut batch = Batch { groups: vec![GroupTables::default(); groups], ..Batch::default() };
        for request in requests {
            let first = request.computed;
            let known = &request.tokens[first..request.tokens.len().min(first + self.chunk)];
            let first_row = batch.tokens.len();
            batch.tokens.extend(known);
            if first + known.len() == request.tokens.len() {
                batch.outputs.extend(batch.tokens.len() as u32 - 1..(batch.tokens.len() + request.draft.len()) as u32);
                batch.tokens.extend(request.draft.tokens());
            }
            let places = first..first + batch.tokens.len() - first_row;
            batch.positions.extend(places.clone().map(|place| place as u32));
            let (num_rows, context) = (places.len() as u32, places.end as u32);
            batch.spans.push(Span { first_row: first_row as u32, num_rows, context });
            while request.table.len() * BLOCK_TOKENS < places.end {
                request.table.push(self.free.remove(0));
            }
            for group in &mut batch.groups {
                group.first_block.push(group.blocks.len() as u32);
                group.blocks.extend(&request.table);
                let slot =
                    |place: usize| request.table[place / BLOCK_TOKENS] as usize * BLOCK_TOKENS + place % BLOCK_TOKENS;
                group.slots.extend(places.clone().map(|place| slot(place) as u32));
            }
        }
        batch
    }
}

fn best(logits: &[f32]) -> u32 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    logits.iter().position(|&logit| logit == largest).expect("a finite logit") as u32
}
