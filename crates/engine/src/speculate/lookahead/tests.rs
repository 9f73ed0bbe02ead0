use folio_device::reference::Reference;

use super::{
    super::{Owner, mix::mix},
    *,
};

const ID: RequestId = RequestId(4);

fn options() -> LookaheadOptions {
    LookaheadOptions { size: 4, window: 4, from_text: false, ..LookaheadOptions::default() }
}

/// A language in which the next token is certain.
type Language = fn(&[u32]) -> u32;

/// One request, and a model that always continues as the language does.
struct Speaker {
    language: Language,
    text: Vec<u32>,
    draft: Draft,
    /// Whether the model's tokens are known after every node.
    tells: bool,
}

impl Speaker {
    fn new(language: Language, prompt: &[u32]) -> Self {
        Self { language, text: prompt.to_vec(), draft: Draft::default(), tells: true }
    }

    /// One pass over the last token and the draft, and the next draft. Returns the number of tokens
    /// that it gave.
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

    /// Tokens of a pass.
    fn rate(&mut self, lookahead: &mut Lookahead, passes: usize, most: usize) -> f64 {
        (0..passes).map(|_| self.pass(lookahead, ID, most)).sum::<usize>() as f64 / passes as f64
    }
}

/// A circle of 100 tokens: the last token decides the next one.
fn circle(text: &[u32]) -> u32 {
    (text[text.len() - 1] * 41 + 3) % 100
}

/// The last two tokens decide the next one, and much of the text does not repeat.
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

/// The text is the same without drafts, whatever the room from pass to pass.
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
    // The next token is 13, which was not seen before.
    assert!(speaker.draft.is_empty() && lookahead.windows[&ID.0].depth() == 1);
    let again = |text: &[u32]| [2, 3, 4, 10, 1][text.len() % 5];
    let mut speaker = Speaker { tells: false, ..Speaker::new(again, &[9]) };
    let rate = speaker.rate(&mut lookahead, 20, 24);
    assert!(speaker.draft.tokens().starts_with(&[4, 10, 1]) && rate > 2.0, "{rate} tokens a pass, {:?}", speaker.draft);
}

/// A window without a draft, or with another one, starts again with single tokens; so does one with
/// too little room.
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
    // As after a preemption: the step computed other rows than those drafted.
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
    // A request with the id of one that has ended finds none of its data.
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
