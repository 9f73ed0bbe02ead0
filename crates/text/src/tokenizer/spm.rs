//! SentencePiece as GGUF stores it: pieces with scores, merged greedily, the best score first.
//!
//! The text is cut into characters; of all neighbours whose union is a piece, the pair with the
//! highest score (the leftmost of equals) is joined, until none is left. A queue holds the
//! candidate pairs, so the work is n log n. Characters that are no piece are spelt in `<0xNN>`
//! bytes.

use std::cmp::Ordering;
use std::collections::{BTreeSet, BinaryHeap, HashMap};

use crate::{Error, Result};

const SPACE: &str = "\u{2581}";

pub struct SentencePiece {
    /// Piece -> (id, score): normal, user-defined and byte pieces, not control tokens.
    pub pieces: HashMap<String, (u32, f32)>,
    /// The ids of `<0x00>` to `<0xFF>`, where the vocabulary has them.
    pub byte_ids: [Option<u32>; 256],
    pub unknown: Option<u32>,
    /// Tokens taken whole out of the text before any merging.
    pub literal: Literals,
    /// Whether a space is put before the text and after each literal token.
    pub space_prefix: bool,
}

/// Tokens searched for in the text; the longest at a place wins.
#[derive(Default)]
pub struct Literals {
    tokens: HashMap<Vec<u8>, Literal>,
    /// The lengths of the tokens that start with a byte: a place in the text costs one look-up for
    /// each, however many tokens there are.
    lengths: HashMap<u8, BTreeSet<usize>>,
}

#[derive(Clone, Copy)]
pub struct Literal {
    pub id: u32,
    /// Whether white space behind it belongs to it, and is no part of the text.
    pub takes_space_behind: bool,
}

impl Literals {
    /// The first of equal tokens counts.
    pub fn add(&mut self, token: &str, literal: Literal) {
        if let Some(first) = token.bytes().next() {
            self.lengths.entry(first).or_default().insert(token.len());
            self.tokens.entry(token.as_bytes().to_vec()).or_insert(literal);
        }
    }

    /// The first literal in `text`: where it starts, where it ends, which it is.
    fn find(&self, text: &str) -> Option<(usize, usize, Literal)> {
        text.bytes().enumerate().find_map(|(at, byte)| {
            self.lengths.get(&byte)?.iter().rev().find_map(|len| {
                let token = text.as_bytes().get(at..at + len)?;
                Some((at, at + len, *self.tokens.get(token)?))
            })
        })
    }
}

/// A run of the text that is one piece so far; an empty one has been merged away.
#[derive(Clone, Copy)]
struct Symbol {
    start: usize,
    len: usize,
    previous: Option<usize>,
    next: Option<usize>,
}

struct Candidate {
    score: f32,
    left: usize,
    right: usize,
    /// Length of the union: a candidate is stale once either side has grown.
    len: usize,
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Candidate {}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left)).then(other.len.cmp(&self.len))
    }
}

impl SentencePiece {
    /// A mark, where there is one, hides literals that it stands in and is no part of the text.
    pub fn encode(&self, text: &str, mark: Option<char>, ids: &mut Vec<u32>) -> Result<()> {
        let mut rest = text;
        loop {
            let found = self.literal.find(rest);
            let (plain, literal) = match found {
                Some((start, end, literal)) => (&rest[..start], Some((end, literal))),
                None => (rest, None),
            };
            let unmarked = mark.map(|mark| plain.replace(mark, ""));
            let plain = unmarked.as_deref().unwrap_or(plain);
            if !plain.is_empty() {
                let prefix = if self.space_prefix { SPACE } else { "" };
                self.merge(&format!("{prefix}{}", plain.replace(' ', SPACE)), ids)?;
            }
            let Some((end, literal)) = literal else {
                return Ok(());
            };
            ids.push(literal.id);
            rest = &rest[end..];
            if literal.takes_space_behind {
                rest = rest.trim_start();
            }
        }
    }

    fn merge(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        let mut symbols: Vec<Symbol> = text
            .char_indices()
            .enumerate()
            .map(|(index, (start, c))| Symbol {
                start,
                len: c.len_utf8(),
                previous: index.checked_sub(1),
                next: Some(index + 1),
            })
            .collect();
        if let Some(last) = symbols.last_mut() {
            last.next = None;
        }
        let mut queue = BinaryHeap::new();
        for right in 1..symbols.len() {
            self.propose(text, &symbols, right - 1, right, &mut queue);
        }
        while let Some(Candidate { left, right, len, .. }) = queue.pop() {
            let (one, two) = (symbols[left], symbols[right]);
            if one.len == 0 || two.len == 0 || one.len + two.len != len {
                continue;
            }
            symbols[left].len = len;
            symbols[left].next = two.next;
            symbols[right].len = 0;
            if let Some(next) = two.next {
                symbols[next].previous = Some(left);
                self.propose(text, &symbols, left, next, &mut queue);
            }
            if let Some(previous) = one.previous {
                self.propose(text, &symbols, previous, left, &mut queue);
            }
        }
        symbols.iter().filter(|symbol| symbol.len > 0).try_for_each(|symbol| {
            let piece = &text[symbol.start..symbol.start + symbol.len];
            self.spell(piece, ids)
        })
    }

    fn propose(&self, text: &str, symbols: &[Symbol], left: usize, right: usize, queue: &mut BinaryHeap<Candidate>) {
        let len = symbols[left].len + symbols[right].len;
        let start = symbols[left].start;
        if let Some(&(_, score)) = self.pieces.get(&text[start..start + len]) {
            queue.push(Candidate { score, left, right, len });
        }
    }

    fn spell(&self, piece: &str, ids: &mut Vec<u32>) -> Result<()> {
        if let Some(&(id, _)) = self.pieces.get(piece) {
            ids.push(id);
            return Ok(());
        }
        let bytes: Option<Vec<u32>> = piece.bytes().map(|byte| self.byte_ids[usize::from(byte)]).collect();
        match (bytes, self.unknown) {
            (Some(bytes), _) => ids.extend(bytes),
            (None, Some(unknown)) => ids.push(unknown),
            (None, None) => return Err(Error::Encode(format!("{piece:?} is not in the vocabulary"))),
        }
        Ok(())
    }
}
