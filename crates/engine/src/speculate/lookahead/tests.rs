use folio_device::reference::Reference;

use super::{
    super::{Owner, mix::mix},
    *,
};

const ID: RequestId = RequestId(4);

fn options() -> LookaheadOptions {
    LookaheadOptions { size: 4, window: 4, from_text: false, ..LookaheadOptions::default() }
}

/// A language of which everybody knows what comes next.
type Language = fn(&[u32]) -> u32;

/// One request, and a model that always says what the language says.
struct Speaker {
    language: Language,
    text: Vec<u32>,
    draft: Draft,
    /// Whether the model tells what it would say.
    tells: bool,
}

impl Speaker {
    fn new(language: Language, prompt: &[u32]) -> Self {
        Self { language, text: prompt.to_vec(), draft: Draft::default(), tells: true }
    }

    /// One pass over the last token and the draft, and the next draft. How many tokens it gave.
    fn pass(&mut self, lookahead: &mut Lookahead, id: RequestId, most: usize) -> usize {
        let before = self.text.len();
        let way = |node: u16| {
            let mut way: Vec<u32> = self.draft.path(node).map(|node| self.draft.tokens()[usize::from(node)]).collect();
            way.reverse();
            [&self.text[..], &way].concat()
        };
        let nodes = 0..self.draft.len() as u16;
        let depths = nodes.clone().map(|node| self.draft.path(node).count());
        let texts = std::iter::once(self.text.clone()).chain(nodes.clone().map(way));
        let guesses: Vec<u32> = texts.map(|text| (self.language)(&text)).collect();
        let batch = Batch {
            tokens: [&self.text[before - 1..], self.draft.tokens()].concat(),
            positions: std::iter::once(0).chain(depths).map(|depth| (before - 1 + depth) as u32).collect(),
            spans: vec![Span { first_row: 0, num_rows: guesses.len() as u32, context: 0 }],
            ..Batch::default()
        };
        let mut at = None;
        loop {
            let row = at.map_or(0, |node: u16| usize::from(node) + 1);
            self.text.push(guesses[row]);
            match self.draft.child(at, guesses[row]) {
                Some(child) => at = Some(child),
                None => break,
            }
        }
        let request = SettledRequest {
            id,
            owner: Owner::default(),
            tokens: &self.text,
            computed: self.text.len() - 1,
            rows: &[],
            output: None,
            guesses: if self.tells { &guesses } else { &[] },
            most,
        };
        self.draft.clear();
        lookahead.draft_one(&batch, &batch.spans[0], &request, &mut self.draft);
        assert!(self.draft.len() <= most);
        self.text.len() - before
    }

    /// Tokens a pass.
    fn rate(&mut self, lookahead: &mut Lookahead, passes: usize, most: usize) -> f64 {
        (0..passes).map(|_| self.pass(lookahead, ID, most)).sum::<usize>() as f64 / passes as f64
    }
}

/// One circle through 100 tokens: what follows is known from the last token alone.
fn circle(text: &[u32]) -> u32 {
    (text[text.len() - 1] * 41 + 3) % 100
}

/// What follows depends on the last two tokens, and much of it does not repeat.
fn pairs(text: &[u32]) -> u32 {
    let pair = u64::from(text[text.len() - 2] % 40) << 32 | u64::from(text[text.len() - 1]);
    (mix(pair) % 500) as u32
}

#[test]
fn a_language_of_single_tokens_is_spoken_several_at_a_time() {
    let mut lookahead = Lookahead::new(options());
    let rate = Speaker::new(circle, &[1, 2, 3]).rate(&mut lookahead, 200, 24);
    assert!(rate > 1.5, "{rate} tokens a pass");
}

#[test]
fn a_text_that_repeats_is_spoken_several_at_a_time() {
    let pattern = |text: &[u32]| (mix(text.len() as u64 % 23) % 300) as u32;
    let mut lookahead = Lookahead::new(options());
    let rate = Speaker::new(pattern, &[1, 2, 3]).rate(&mut lookahead, 200, 24);
    assert!(rate > 1.5, "{rate} tokens a pass without the text");
    let mut lookahead = Lookahead::new(LookaheadOptions { from_text: true, ..options() });
    let rate = Speaker::new(pattern, &[1, 2, 3]).rate(&mut lookahead, 200, 24);
    assert!(rate > 2.5, "{rate} tokens a pass with the text");
}

/// The text is what it is without any of this, however much room there is from pass to pass.
#[test]
fn drafts_never_change_the_text() {
    for seed in 0..20 {
        let mut lookahead = Lookahead::new(LookaheadOptions { from_text: seed % 2 == 0, ..options() });
        let mut speaker = Speaker::new(pairs, &[5, 6, seed as u32]);
        let mut expected = speaker.text.clone();
        for pass in 0..150 {
            let most = (mix(seed << 32 | pass) % 64) as usize;
            speaker.tells = !mix(pass).is_multiple_of(5);
            speaker.pass(&mut lookahead, ID, if most < 10 { 0 } else { most });
        }
        while expected.len() < speaker.text.len() {
            expected.push(pairs(&expected));
        }
        assert_eq!(speaker.text, expected);
    }
}

#[test]
fn without_guesses_there_is_the_pool_alone() {
    let mut lookahead = Lookahead::new(LookaheadOptions { from_text: true, ..options() });
    let mut speaker = Speaker::new(circle, &[1, 2, 3, 4, 10]);
    speaker.tells = false;
    speaker.pass(&mut lookahead, ID, 24);
    // 13 follows, which was never seen.
    assert!(speaker.draft.is_empty() && lookahead.windows[&ID.0].depth() == 1);
    let again = |text: &[u32]| [2, 3, 4, 10, 1][text.len() % 5];
    let mut speaker = Speaker { tells: false, ..Speaker::new(again, &[9]) };
    let rate = speaker.rate(&mut lookahead, 20, 24);
    assert!(speaker.draft.tokens().starts_with(&[4, 10, 1]) && rate > 2.0, "{rate} tokens a pass, {:?}", speaker.draft);
}

/// A window that had no draft, or another, starts anew with single guesses; so does one of too little room.
#[test]
fn a_window_that_missed_a_step_starts_anew() {
    let depth = |lookahead: &Lookahead| lookahead.windows.get(&ID.0).map(Window::depth);
    let mut lookahead = Lookahead::new(options());
    let mut speaker = Speaker::new(pairs, &[1, 2, 3]);
    speaker.rate(&mut lookahead, 10, 24);
    assert_eq!(depth(&lookahead), Some(3));
    speaker.pass(&mut lookahead, ID, 0);
    assert_eq!(depth(&lookahead), None);
    speaker.rate(&mut lookahead, 10, 24);
    assert_eq!(depth(&lookahead), Some(3));
    // As after a preemption: what was computed is not what was drafted.
    speaker.draft.clear();
    speaker.text.push(7);
    speaker.pass(&mut lookahead, ID, 24);
    assert_eq!(depth(&lookahead), Some(1));
    speaker.rate(&mut lookahead, 10, 24);
    assert_eq!(depth(&lookahead), Some(3));
    speaker.pass(&mut lookahead, ID, 4);
    assert_eq!(depth(&lookahead), Some(1));
    assert!(speaker.draft.len() <= 4);
}

#[test]
fn a_draft_that_was_cut_short_still_teaches() {
    let mut lookahead = Lookahead::new(options());
    let mut speaker = Speaker::new(circle, &[1, 2, 3]);
    speaker.rate(&mut lookahead, 3, 24);
    let known = lookahead.pools.pool(ID).len();
    for _ in 0..10 {
        speaker.draft.truncate(speaker.draft.len() - 2);
        speaker.pass(&mut lookahead, ID, 24);
    }
    let learnt = lookahead.pools.pool(ID).len() - known;
    assert!(learnt > 5, "{learnt} n-grams, {:?}", speaker.draft);
}

#[test]
fn nothing_passes_between_requests() {
    let mut shared = Lookahead::new(options());
    let mut other = Speaker::new(circle, &[77, 78]);
    let (mut beside, mut alone) = (Speaker::new(pairs, &[1, 2]), Speaker::new(pairs, &[1, 2]));
    let mut own = Lookahead::new(options());
    for _ in 0..50 {
        other.pass(&mut shared, RequestId(9), 24);
        beside.pass(&mut shared, ID, 24);
        alone.pass(&mut own, ID, 24);
        assert_eq!(beside.draft, alone.draft);
    }
    // Whoever comes with the id of one that has left finds nothing of it.
    let forget: fn(&mut Lookahead, RequestId) = <Lookahead as Drafter<Reference>>::forget;
    forget(&mut shared, ID);
    let (mut second, mut first) = (Speaker::new(pairs, &[8, 9]), Speaker::new(pairs, &[8, 9]));
    let mut own = Lookahead::new(options());
    for _ in 0..50 {
        second.pass(&mut shared, ID, 24);
        first.pass(&mut own, ID, 24);
        assert_eq!(second.draft, first.draft);
    }
    forget(&mut shared, ID);
    forget(&mut shared, RequestId(9));
    assert!(shared.windows.is_empty() && shared.pools.pool(ID).is_empty());
}
