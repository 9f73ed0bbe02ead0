//! Long answers compared with the reference's: the number of identical answers and, forced along
//! the reference's tokens, how often the likeliest token is the same and, if not, how near a tie it
//! was.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use folio_device::{Backend, KvFormat, reference::Reference};
use folio_model::OpenModel;

use crate::{
    crowd::{Crowd, Turn},
    file, run,
};

/// Tokens per step of prompts.
const STEP_ROWS: usize = 2048;
/// A disagreement is a near tie if the reference prefers its token by less than this multiple of
/// the logits' difference: the root of the mean square of all differences or of the position's,
/// whichever is larger. If a router was near a tie, another expert may be chosen, and all logits of
/// that position differ by more than elsewhere.
const NEAR: f64 = 4.0;

/// Prompts, and the length of answers.
pub struct Questions {
    pub prompts: Vec<Vec<u32>>,
    pub answer: usize,
}

impl Questions {
    /// Pieces of the project's own text, of different lengths.
    pub fn of_text(count: usize, answer: usize) -> Self {
        #[derive(serde::Deserialize)]
        struct Text {
            ids: Vec<u32>,
        }
        let Text { ids } = file::unpack(&file::folder().join("../eval.json.lzma"));
        let stride = (ids.len() - 64) / count;
        let prompts = (0..count).map(|i| ids[i * stride..][..length(i)].to_vec()).collect();
        Self { prompts, answer }
    }

    fn lengths(&self) -> Vec<usize> {
        self.prompts.iter().map(|prompt| prompt.len() + self.answer).collect()
    }

    /// Computes all prompts, as many per step as fit; returns rows of logits of each one's last
    /// token, in order.
    fn ask<B: Backend>(&self, crowd: &mut Crowd<B>) -> Result<Vec<f32>, String> {
        let (mut all, mut logits, mut first) = (Vec::new(), Vec::new(), 0);
        while first < self.prompts.len() {
            let mut room = STEP_ROWS;
            let fits = |prompt: &&Vec<u32>| {
                let fits = prompt.len() <= room;
                room = room.saturating_sub(prompt.len());
                fits
            };
            let count = self.prompts[first..].iter().take_while(fits).count();
            let turn = |who: usize| Turn { who, tokens: &self.prompts[who], outputs: 1 };
            crowd.step(&(first..first + count).map(turn).collect::<Vec<_>>(), &mut logits)?;
            all.append(&mut logits);
            first += count;
        }
        Ok(all)
    }

    fn crowd<B: Backend>(&self, backend: B, model: &OpenModel, kv: KvFormat) -> Result<Crowd<B>, String> {
        Crowd::new(backend, model, &self.lengths(), (STEP_ROWS, self.prompts.len()), kv)
    }

    /// The likeliest tokens of all sequences, one token of each per step.
    pub fn greedy<B: Backend>(&self, backend: B, model: &OpenModel, kv: KvFormat) -> Result<Vec<Vec<u32>>, String> {
        let start = Instant::now();
        let mut crowd = self.crowd(backend, model, kv)?;
        let mut logits = self.ask(&mut crowd)?;
        let mut answers = vec![Vec::new(); self.prompts.len()];
        for step in 1..=self.answer {
            let tokens = in_parallel(self.prompts.len(), |who| run::argmax(row(&logits, who, model)));
            answers.iter_mut().zip(&tokens).for_each(|(answer, token)| answer.push(*token));
            if step < self.answer {
                let turn = |who: usize| Turn { who, tokens: &tokens[who..=who], outputs: 1 };
                crowd.step(&(0..tokens.len()).map(turn).collect::<Vec<_>>(), &mut logits)?;
            }
        }
        println!("{} answers of {} tokens in {:.1} s", answers.len(), self.answer, start.elapsed().as_secs_f64());
        Ok(answers)
    }

    /// The reference's answers. A correct guess costs one step, since its rows do not depend on the
    /// division into steps.
    pub fn judge(&self, model: &OpenModel, guesses: &[Vec<u32>]) -> Vec<Verdict> {
        let start = Instant::now();
        let longest = self.lengths().into_iter().max().unwrap_or(0);
        let decoders = Mutex::new(Vec::new());
        let verdicts = in_parallel(self.prompts.len(), |who| {
            let idle = decoders.lock().expect("nobody panics").pop();
            let mut crowd = idle.unwrap_or_else(|| {
                let crowd = Crowd::new(Reference::new(), model, &[longest], (longest, self.answer), KvFormat::F32);
                crowd.unwrap_or_else(|error| panic!("{error}"))
            });
            let verdict = Verdict::of(&mut crowd, &self.prompts[who], &guesses[who], model.spec.vocab_size);
            decoders.lock().expect("nobody panics").push(crowd);
            verdict.unwrap_or_else(|error| panic!("{error}"))
        });
        println!("the reference took {:.1} s", start.elapsed().as_secs_f64());
        verdicts
    }

    /// Compares a backend that is forced along the reference's answers with it, token by token as
    /// answers are generated.
    pub fn forced<B: Backend>(
        &self,
        backend: B,
        model: &OpenModel,
        kv: KvFormat,
        verdicts: &[Verdict],
    ) -> Result<Figures, String> {
        let mut crowd = self.crowd(backend, model, kv)?;
        let mut logits = self.ask(&mut crowd)?;
        let mut marks = vec![Vec::new(); verdicts.len()];
        for step in 0..self.answer {
            let mark = |who: usize| verdicts[who].mark(step, row(&logits, who, model));
            let found = in_parallel(verdicts.len(), mark);
            marks.iter_mut().zip(found).for_each(|(marks, mark)| marks.push(mark));
            if step + 1 < self.answer {
                let turn = |who: usize| Turn { who, tokens: &verdicts[who].tokens[step..=step], outputs: 1 };
                crowd.step(&(0..verdicts.len()).map(turn).collect::<Vec<_>>(), &mut logits)?;
            }
        }
        Ok(Figures::of(&marks))
    }
}

/// Length of the prompt with this number.
pub fn length(number: usize) -> usize {
    8 + number * 13 % 48
}

fn row<'a>(logits: &'a [f32], number: usize, model: &OpenModel) -> &'a [f32] {
    &logits[number * model.spec.vocab_size..][..model.spec.vocab_size]
}

/// `work` of `0..count`, on all cores.
fn in_parallel<T: Send>(count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from).min(count) {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        return;
                    }
                    let result = work(number);
                    found.lock().expect("nobody panics").push((number, result));
                }
            });
        }
    });
    let mut found = found.into_inner().expect("nobody panics");
    found.sort_unstable_by_key(|(number, _)| *number);
    found.into_iter().map(|(_, result)| result).collect()
}

/// The reference's answer to one prompt.
pub struct Verdict {
    pub tokens: Vec<u32>,
    /// Logit of each of its tokens.
    logits: Vec<f32>,
    /// Lead of each over the second best.
    gaps: Vec<f64>,
    /// Index of the first token that differs from the guess.
    pub parted: Option<usize>,
}

/// Comparison of a backend's row with the reference's.
#[derive(Clone, Copy)]
struct Mark {
    agrees: bool,
    gap: f64,
    mean_square: f64,
}

impl Verdict {
    fn of(crowd: &mut Crowd<Reference>, prompt: &[u32], guess: &[u32], vocabulary: usize) -> Result<Self, String> {
        let (mut logits, mut more) = (Vec::new(), Vec::new());
        let (last, known) = guess.split_last().expect("an answer has tokens");
        let text = [prompt, known].concat();
        crowd.rewind(0, 0);
        crowd.step(&[Turn { who: 0, tokens: &text, outputs: guess.len() }], &mut logits)?;
        let mut tokens: Vec<u32> = logits.chunks_exact(vocabulary).map(run::argmax).collect();
        let parted = tokens.iter().zip(known.iter().chain([last])).position(|(own, guessed)| own != guessed);
        if let Some(first) = parted {
            tokens.truncate(first + 1);
            logits.truncate((first + 1) * vocabulary);
            crowd.rewind(0, prompt.len() + first);
            while tokens.len() < guess.len() {
                let newest = &tokens[tokens.len() - 1..];
                crowd.step(&[Turn { who: 0, tokens: newest, outputs: 1 }], &mut more)?;
                tokens.push(run::argmax(&more));
                logits.append(&mut more);
            }
        }
        let gaps = logits.chunks_exact(vocabulary).map(gap).collect();
        Ok(Self { tokens, logits, gaps, parted })
    }

    fn mark(&self, step: usize, found: &[f32]) -> Mark {
        let expected = &self.logits[step * found.len()..][..found.len()];
        let squares = expected.iter().zip(found).map(|(e, f)| (f64::from(*e) - f64::from(*f)).powi(2));
        let mean_square = squares.sum::<f64>() / found.len() as f64;
        Mark { agrees: run::argmax(found) == self.tokens[step], gap: self.gaps[step], mean_square }
    }
}

/// Lead of the largest over the second.
fn gap(row: &[f32]) -> f64 {
    let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for &logit in row {
        if logit > first {
            (first, second) = (logit, first);
        } else if logit > second {
            second = logit;
        }
    }
    f64::from(first) - f64::from(second)
}

/// Comparison of a backend's answers with the reference's.
#[derive(Debug)]
pub struct Figures {
    pub positions: usize,
    /// Share of positions with the reference's likeliest token.
    pub agreement: f64,
    /// Answers that agree at every position.
    pub whole_answers: usize,
    /// Root of the mean square of all logits' differences.
    pub difference: f64,
    /// Disagreements: the reference's preference for its own token, in units of `difference`, and
    /// the difference of the logits there, in the same units. Clearest first.
    pub gaps: Vec<(f64, f64)>,
    /// The reference's median lead, over all positions.
    pub median_gap: f64,
}

impl Figures {
    fn of(answers: &[Vec<Mark>]) -> Self {
        let marks = || answers.iter().flatten();
        let positions = marks().count();
        let difference = (marks().map(|mark| mark.mean_square).sum::<f64>() / positions as f64).sqrt();
        let relative = |mark: &Mark| (mark.gap / difference, mark.mean_square.sqrt() / difference);
        let mut gaps: Vec<(f64, f64)> = marks().filter(|mark| !mark.agrees).map(relative).collect();
        gaps.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut all_gaps: Vec<f64> = marks().map(|mark| mark.gap).collect();
        all_gaps.sort_by(f64::total_cmp);
        Self {
            positions,
            agreement: 1.0 - gaps.len() as f64 / positions as f64,
            whole_answers: answers.iter().filter(|marks| marks.iter().all(|mark| mark.agrees)).count(),
            difference,
            gaps,
            median_gap: all_gaps[positions / 2],
        }
    }

    /// Number of disagreements that are no near ties.
    pub fn clear(&self) -> usize {
        self.gaps.iter().filter(|(gap, there)| *gap > NEAR * there.max(1.0)).count()
    }

    /// Disagreements that are no near ties by the overall difference of logits alone.
    fn clear_overall(&self) -> usize {
        self.gaps.iter().filter(|(gap, _)| *gap > NEAR).count()
    }

    pub fn print(&self, name: &str) {
        println!(
            "{name}: the likeliest token agrees at {:.3}% of {} positions and all along {} answers; logits {:.2e} apart \
             (root mean square), the first token leads by {:.2} (median); {} disagreements, {} of them beyond {NEAR} \
             differences ({} where the position's own does not count), the clearest and the difference there {:.2?}",
            100.0 * self.agreement,
            self.positions,
            self.whole_answers,
            self.difference,
            self.median_gap,
            self.gaps.len(),
            self.clear(),
            self.clear_overall(),
            &self.gaps[..self.gaps.len().min(8)]
        );
    }
}
