//! Requests of several salts, side by side and one after the other.

use super::*;

const MOST: usize = 8;

/// A request: the probability that a drafted token is accepted, and the steps in which it decodes.
#[derive(Clone, Copy)]
struct Asks {
    id: u64,
    salt: u64,
    agreement: f64,
    steps: (usize, usize),
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as f64 + 0.5) / (1_u64 << 31) as f64
    }
}

/// Results of one request: the nodes requested in each step, and all accepted ones.
#[derive(Clone, Debug, Default, PartialEq)]
struct Met {
    asked: Vec<usize>,
    held: usize,
}

impl Met {
    fn mean(&self) -> f64 {
        let late = &self.asked[self.asked.len() / 2..];
        late.iter().sum::<usize>() as f64 / late.len() as f64
    }
}

/// Runs the requests. `seconds` of a step by all its rows, drafts included.
fn run(watches: &mut Watches, all: &[Asks], steps: usize, seconds: impl Fn(usize) -> f64) -> Vec<Met> {
    let mut met = vec![Met::default(); all.len()];
    let mut random: Vec<Random> = all.iter().map(|asks| Random(7919 * asks.id + 17)).collect();
    let mut nodes = vec![0; all.len()];
    for step in 0..steps {
        let here: Vec<usize> = (0..all.len()).filter(|&n| (all[n].steps.0..all[n].steps.1).contains(&step)).collect();
        let drafts: Vec<Draft> = here.iter().map(|&n| Draft::chain(0..nodes[n] as u32)).collect();
        let accepted: Vec<Vec<u16>> = here
            .iter()
            .map(|&n| (0..nodes[n] as u16).take_while(|_| random[n].next() < all[n].agreement).collect())
            .collect();
        let seen: Vec<Seen<'_>> = (here.iter().zip(&drafts).zip(&accepted))
            .map(|((&n, drafted), accepted)| Seen {
                id: RequestId(all[n].id),
                owner: Owner { tenant: all[n].salt, salt: all[n].salt },
                drafted,
                accepted,
                goes_on: step + 1 < all[n].steps.1,
            })
            .collect();
        let rows = here.len() + drafts.iter().map(Draft::len).sum::<usize>();
        let took = Duration::from_secs_f64(seconds(rows));
        let is_decode_only = here.iter().all(|&n| all[n].steps.0 < step);
        let note = StepNote { rows, gap: Duration::from_micros(20), took, is_decode_only };
        let asked = watches.behind(note, &seen);
        let num_asked = asked.iter().filter(|&&nodes| nodes > 0).count();
        watches.drafted(note, &seen, &asked, num_asked as u32 * Duration::from_micros(10));
        for ((&n, &asked), accepted) in here.iter().zip(&asked).zip(&accepted) {
            nodes[n] = asked;
            met[n].asked.push(asked);
            met[n].held += accepted.len();
            if step + 1 == all[n].steps.1 {
                watches.forget(RequestId(all[n].id));
            }
        }
    }
    met
}

fn adaptive() -> Watches {
    Watches::new(AdaptOptions { most_nodes: MOST, fixed: None })
}

/// A step takes 4 ms, and little more for each row.
fn machine(rows: usize) -> f64 {
    4e-3 + 0.1e-3 * rows as f64
}

/// Requests of one salt, with requests of others before, beside and between them.
#[test]
fn how_much_others_drafts_agree_does_not_show() {
    let own = |id, steps| Asks { id, salt: 2, agreement: 0.7, steps };
    let mut seen = Vec::new();
    for agreement in [0.0, 0.5, 1.0] {
        for others_salt in [1, 2] {
            let other = |id, steps| Asks { id, salt: others_salt, agreement, steps };
            let all = [
                other(10, (0, 300)),
                other(11, (100, 400)),
                own(1, (410, 600)),
                other(12, (620, 1000)),
                own(2, (650, 950)),
                own(3, (1010, 1200)),
            ];
            // While rows cost nearly nothing, the time of others' drafts has no effect either.
            let mut met = run(&mut adaptive(), &all, 1200, |_| 4e-3);
            let own = [met.remove(5), met.remove(4), met.remove(2)];
            assert!(own.iter().all(|met| met.mean() > 1.0), "{agreement}: {own:?}");
            seen.push((others_salt, own));
        }
    }
    let of_others: Vec<_> = seen.iter().filter(|(salt, _)| *salt == 1).map(|(_, own)| own).collect();
    assert!(of_others.iter().all(|own| *own == of_others[0]), "others show: {of_others:?}");
    let of_own: Vec<_> = seen.iter().filter(|(salt, _)| *salt == 2).map(|(_, own)| own).collect();
    assert!(of_own.iter().any(|own| *own != of_own[0]), "nothing is learned within a salt");
}

#[test]
fn each_salt_finds_out_whether_drafts_pay_for_it() {
    let all: Vec<Asks> = (0..8)
        .map(|n| Asks { id: n, salt: n, agreement: if n % 2 == 0 { 0.9 } else { 0.0 }, steps: (0, 1500) })
        .collect();
    let met = run(&mut adaptive(), &all, 1500, machine);
    for (asks, met) in all.iter().zip(&met) {
        match asks.agreement > 0.5 {
            true => assert!(met.mean() > 1.0, "salt {}: {}", asks.salt, met.mean()),
            false => assert!(met.mean() < 0.3, "salt {}: {}", asks.salt, met.mean()),
        }
    }
}

/// If every row costs as much as a token is worth, many salts lose no more than one.
#[test]
fn many_salts_do_not_lose_more_than_one() {
    let dear = |rows: usize| 0.2e-3 + 1e-3 * rows as f64;
    let rows = |salts: u64| {
        let all: Vec<Asks> =
            (0..8).map(|n| Asks { id: n, salt: n % salts, agreement: 0.5, steps: (0, 1500) }).collect();
        let met = run(&mut adaptive(), &all, 1500, dear);
        met.iter().map(Met::mean).sum::<f64>()
    };
    for salts in [1, 2, 8] {
        let rows = rows(salts);
        assert!(rows < 0.8, "{salts} salts: {rows} rows a step");
    }
}

#[test]
fn quiet_is_of_a_salt() {
    // No request ever expects drafts.
    let mut watches = Watches::new(AdaptOptions { most_nodes: MOST, fixed: Some(0) });
    let draft = Draft::default();
    let mut steps = |salt, count, drafting| {
        let owner = Owner { tenant: 1, salt };
        for _ in 0..count {
            let seen = [Seen { id: RequestId(salt), owner, drafted: &draft, accepted: &[], goes_on: true }];
            let took = Duration::from_millis(1);
            let note = StepNote { rows: 1, gap: Duration::ZERO, took, is_decode_only: true };
            assert_eq!(watches.behind(note, &seen), [0]);
            watches.drafted(note, &seen, &[0], drafting);
        }
        [vec![1], vec![2], vec![1, 2], vec![3]].map(|salts| watches.wait(salts.into_iter()))
    };
    assert_eq!(steps(1, 31, Duration::ZERO), [true; 4]);
    assert_eq!(steps(1, 1, Duration::ZERO), [false, true, true, true]);
    assert_eq!(steps(2, 2, Duration::from_micros(400)), [false, true, true, true]);
    assert_eq!(steps(2, 1, Duration::from_micros(400)), [false, false, false, true], "it took more than a step");
}
