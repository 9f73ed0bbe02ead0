//! Drafters that know how answers continue, and draft what a test asks for.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use folio_device::{Backend, DRAWN_TOKEN};
use folio_engine::{
    Error, RequestId, Result,
    speculate::{Draft, Drafter, Owner, Settled, SettledRequest},
};
use folio_model::Decoder;

/// The quality of the drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// All tokens are correct.
    Perfect,
    /// No token is correct.
    Bad,
    /// Trees that contain the correct path, as far as they reach.
    Trees,
    /// Every other step fails, alternately by an error and a panic.
    Failing,
    /// Every step fails.
    Broken,
}

/// Counts of a drafter.
#[derive(Debug, Default)]
pub struct Met {
    /// Faults in the steps that it was given.
    pub faults: Vec<String>,
    pub drafts: usize,
    pub trees: usize,
    pub learned: usize,
    pub forgotten: usize,
}

pub struct Knowing {
    pub manner: Manner,
    pub reads_step: bool,
    pub vocab: u32,
    /// Prompts with their answers.
    pub sequences: Arc<Vec<Vec<u32>>>,
    pub met: Arc<Mutex<Met>>,
    pub random: u64,
}

impl Knowing {
    pub fn met(&self) -> MutexGuard<'_, Met> {
        self.met.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn below(&mut self, end: u32) -> u32 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.random >> 33) % u64::from(end)) as u32
    }

    fn grow(&mut self, tokens: &[u32], most: usize, draft: &mut Draft) {
        let sequences = Arc::clone(&self.sequences);
        let known = sequences.iter().find(|known| known.starts_with(tokens));
        let rest = known.map_or(&[][..], |known| &known[tokens.len()..]);
        match self.manner {
            Manner::Trees => self.grow_tree(rest, most, draft),
            Manner::Bad => {
                // The correct token and its neighbours differ.
                let wrong = rest.iter().map(|token| (token + 1 + self.random as u32 % 7) % self.vocab);
                *draft = Draft::chain(wrong.take(most));
            }
            _ => *draft = Draft::chain(rest.iter().copied().take(most)),
        }
    }

    fn grow_tree(&mut self, rest: &[u32], most: usize, draft: &mut Draft) {
        // The end of the correct path, and its depth.
        let (mut right, mut depth) = (None, 0);
        let nodes = self.below(most as u32 + 1) as usize;
        for _ in 0..10 * nodes {
            if draft.len() == nodes {
                break;
            }
            if self.below(2) == 0 && depth < rest.len() {
                right = Some(draft.push(rest[depth], right));
                depth += 1;
            } else {
                let parent = self.below(draft.len() as u32 + 1).checked_sub(1).map(|node| node as u16);
                let token = self.below(self.vocab);
                draft.push(token, parent);
            }
        }
    }
}

/// Checks the data of a request.
fn check(step: &Settled<'_>, index: usize, request: &SettledRequest<'_>) -> std::result::Result<(), String> {
    let ensure =
        |holds: bool, what: &str| if holds { Ok(()) } else { Err(format!("request {}: {what}", request.id.0)) };
    let span = &step.batch.spans[index];
    let first = request.computed.wrapping_sub(request.rows.len());
    ensure(request.computed <= request.tokens.len(), "more is computed than there is")?;
    ensure(request.rows[0] == span.first_row, "its rows do not begin with its span")?;
    for (place, &row) in (first..).zip(request.rows) {
        let token = step.batch.tokens[row as usize];
        ensure(token >= DRAWN_TOKEN || token == request.tokens[place], "a row of another token")?;
        ensure(step.batch.positions[row as usize] as usize == place, "a row of another position")?;
        ensure((span.first_row..span.first_row + span.num_rows).contains(&row), "a row of somebody else")?;
    }
    let output = request.output.map(|output| step.batch.outputs[output as usize]);
    ensure(output.is_none_or(|row| request.rows.last() == Some(&row)), "its output is not that of its last row")?;
    ensure(request.most == 0 || output.is_some(), "a draft behind no output")?;
    ensure(
        request.most == 0 || request.computed + 1 == request.tokens.len(),
        "a draft behind tokens that are not there",
    )
}

impl<B: Backend> Drafter<B> for Knowing {
    fn draft(&mut self, decoder: &mut Decoder<B>, step: &Settled<'_>, drafts: &mut [Draft]) -> Result<()> {
        assert_eq!(decoder.spec().vocab_size, self.vocab as usize);
        assert!(drafts.len() == step.requests.len() && drafts.iter().all(Draft::is_empty));
        for (index, (request, draft)) in step.requests.iter().zip(&mut *drafts).enumerate() {
            if request.tokens.is_empty() {
                continue;
            }
            if let Err(fault) = check(step, index, request) {
                self.met().faults.push(fault);
            }
            self.grow(request.tokens, request.most, draft);
            let mut met = self.met();
            met.drafts += usize::from(!draft.is_empty());
            met.trees += usize::from(!draft.is_chain());
        }
        let is_failing = match self.manner {
            Manner::Failing => self.below(2) == 0,
            Manner::Broken => true,
            _ => false,
        };
        match is_failing.then(|| self.below(2)) {
            None => Ok(()),
            Some(0) => Err(Error::Step("planted failure".into())),
            Some(_) => panic!("planted panic"),
        }
    }

    fn reads_step(&self) -> bool {
        self.reads_step
    }

    fn reads_guesses(&self) -> bool {
        self.reads_step
    }

    fn learn(&mut self, _: Owner, _: &[u32]) {
        self.met().learned += 1;
    }

    fn forget(&mut self, _: RequestId) {
        self.met().forgotten += 1;
    }
}
