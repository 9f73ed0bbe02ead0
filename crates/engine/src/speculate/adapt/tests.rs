//! A model of machines with realistic costs and agreement, on which speculation must never lose and
//! should mostly win.

mod pair;

use super::*;

/// The times of a machine.
#[derive(Clone, Copy)]
struct World {
    /// Seconds of a step with this number of rows.
    step: fn(usize) -> f64,
    /// Ratio of the last step's time to the first's.
    drift: f64,
    /// Seconds for each node of the longest draft.
    drafting: f64,
    /// Seconds that a step waits if it is not planned ahead.
    gap: f64,
    /// Part of the steps in which the method makes a draft.
    speaks: f64,
}

/// Two cores and a small model.
fn cpu(rows: usize) -> f64 {
    4.0e-3 + 0.35e-3 * (rows - 1) as f64
}

/// Reading the weights takes all of the time for small steps.
fn gpu(rows: usize) -> f64 {
    3.9e-3 + 0.01e-3 * rows.min(128) as f64 + 0.05e-3 * rows.saturating_sub(128) as f64
}

/// Every row costs the same.
fn bound(rows: usize) -> f64 {
    1e-3 + 1e-3 * rows as f64
}

/// Rows come in tiles of 16: one more may be free, or double the time.
fn tiles(rows: usize) -> f64 {
    2e-3 * rows.div_ceil(16) as f64
}

const CPU: World = World { step: cpu, drift: 0.0, drafting: 2e-6, gap: 40e-6, speaks: 1.0 };
const GPU: World = World { step: gpu, gap: 200e-6, ..CPU };

fn worlds() -> Vec<(&'static str, World)> {
    vec![
        ("cpu", CPU),
        ("cpu, draft model", World { drafting: 0.7e-3, ..CPU }),
        ("cpu, seldom", World { speaks: 0.1, ..CPU }),
        ("gpu", GPU),
        ("gpu, draft model", World { drafting: 0.4e-3, ..GPU }),
        ("gpu, seldom", World { speaks: 0.1, ..GPU }),
        ("bound", World { step: bound, ..CPU }),
        ("tiles", World { step: tiles, ..CPU }),
    ]
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as f64 + 0.5) / (1_u64 << 31) as f64
    }

    /// About one: up to a tenth more or less, and now and then an outlier.
    fn noise(&mut self) -> f64 {
        let bell: f64 = (0..4).map(|_| self.next()).sum::<f64>() - 2.0;
        let hiccup = if self.next() < 0.02 { 1.0 + 4.0 * self.next() } else { 1.0 };
        (1.0 + 0.17 * bell).max(0.5) * hiccup
    }
}

const MOST: usize = 12;

/// The controller of a run: the one that is tested, or a constant.
enum Controller {
    Auto(Box<Adapt>),
    Always(usize),
}

fn auto() -> Controller {
    Controller::Auto(Box::new(Adapt::new(AdaptOptions { most_nodes: MOST, fixed: None })))
}

/// Results of a run.
struct Run {
    /// Mean tokens: luck is not tested.
    tokens: f64,
    seconds: f64,
    /// Time of the same tokens without speculation.
    plain_seconds: f64,
    /// Mean nodes of each request, in the last quarter.
    nodes: Vec<f64>,
}

impl Run {
    fn of_plain(&self) -> f64 {
        self.plain_seconds / self.seconds
    }
}

/// `agreement` of a request in a step.
fn run(world: World, requests: usize, steps: usize, agreement: impl Fn(usize, usize) -> f64, who: Controller) -> Run {
    let mut random = Random(7 + requests as u64);
    let chains: Vec<Draft> = (0..=MOST as u32).map(|nodes| Draft::chain(0..nodes)).collect();
    let accepted: Vec<u16> = (0..MOST as u16).collect();
    let ids: Vec<RequestId> = (0..requests as u64).map(RequestId).collect();
    let (mut who, mut nodes, mut waits) = (who, vec![0; requests], false);
    let mut run = Run { tokens: 0.0, seconds: 0.0, plain_seconds: 0.0, nodes: vec![0.0; requests] };
    for step in 0..steps {
        let drift = 1.0 + world.drift * step as f64 / steps as f64;
        let mut drafts = vec![0; requests];
        for (draft, &nodes) in drafts.iter_mut().zip(&nodes) {
            *draft = if nodes > 0 && random.next() < world.speaks { nodes } else { 0 };
        }
        let rows = requests + drafts.iter().sum::<usize>();
        // The result counts a step's mean time; the controller sees the measured one.
        let (took, gap) = ((world.step)(rows) * drift, if waits { world.gap } else { 0.0 });
        run.seconds += took + gap;
        if let Controller::Auto(adapt) = &mut who {
            adapt.note_gap(Duration::from_secs_f64(gap * random.noise()));
            adapt.note_step(rows, Duration::from_secs_f64(took * random.noise()), true);
        }
        let mut tokens = 0.0;
        for (request, &draft) in drafts.iter().enumerate() {
            let agreement = agreement(request, step);
            tokens += (0..=draft as i32).map(|depth| agreement.powi(depth)).sum::<f64>();
            if step >= steps * 3 / 4 {
                run.nodes[request] += draft as f64 / (steps - steps * 3 / 4) as f64;
            }
            if let Controller::Auto(adapt) = &mut who
                && draft > 0
            {
                let held = (0..draft).take_while(|_| random.next() < agreement).count();
                adapt.note_walk(ids[request], &chains[draft], &accepted[..held]);
            }
        }
        run.tokens += tokens;
        run.plain_seconds += tokens / requests as f64 * (world.step)(requests) * drift;
        match &mut who {
            Controller::Auto(adapt) => {
                adapt.most(&ids, 0, &mut nodes);
                assert!(waits || nodes.iter().all(|&nodes| nodes == 0), "the next step is under way");
                waits = adapt.expects();
                let took = world.drafting * nodes.iter().copied().max().unwrap_or(0) as f64;
                run.seconds += took;
                let longest = nodes.iter().copied().max().unwrap_or(0);
                adapt.note_drafting(requests, longest, Duration::from_secs_f64(took * random.noise()));
            }
            Controller::Always(always) => {
                nodes.fill(*always);
                waits = *always > 0;
                run.seconds += world.drafting * *always as f64;
            }
        }
    }
    run
}

/// One machine, batch and agreement: compares a controller with no speculation, and with the best
/// constant.
#[derive(Debug)]
#[allow(dead_code, reason = "for whoever reads that it failed")]
struct Found {
    world: &'static str,
    requests: usize,
    agreement: f64,
    best: f64,
    of_plain: f64,
    of_best: f64,
}

fn compare(controller: fn() -> Controller, agreements: &[f64]) -> Vec<Found> {
    let mut seen = Vec::new();
    for (name, world) in worlds() {
        for requests in [1, 4, 16, 64] {
            // Larger batches are slower to compute here, and quicker to learn.
            let steps = if requests < 64 { 2000 } else { 1000 };
            for &agreement in agreements {
                let of_plain = |steps, who| run(world, requests, steps, |_, _| agreement, who).of_plain();
                let always = [1, 2, 3, 4, 6, 8, MOST].map(|nodes| of_plain(60, Controller::Always(nodes)));
                let best = always.into_iter().fold(1.0, f64::max);
                let of_plain = of_plain(steps, controller());
                let of_best = of_plain / best;
                seen.push(Found { world: name, requests, agreement, best, of_plain, of_best });
            }
        }
    }
    seen
}

const SLOWER: f64 = 0.985;

#[test]
fn speculation_is_never_slower_and_nearly_the_best() {
    let seen = compare(auto, &[0.0, 0.3, 0.6, 0.9]);
    let slower: Vec<_> = seen.iter().filter(|found| found.of_plain < SLOWER).collect();
    assert!(slower.is_empty(), "{slower:#?}");
    let worthwhile: Vec<_> = seen.iter().filter(|found| found.best > 1.15).collect();
    let far: Vec<_> = worthwhile.iter().filter(|found| found.of_best < 0.85).collect();
    assert!(far.is_empty(), "{far:#?}");
    let mean = worthwhile.iter().map(|found| found.of_best).sum::<f64>() / worthwhile.len() as f64;
    assert!(mean > 0.96, "{mean}");
}

#[test]
fn the_worlds_tell_a_bad_controller() {
    for always in [|| Controller::Always(1), || Controller::Always(4)] {
        assert!(compare(always, &[0.0, 0.9]).iter().any(|found| found.of_plain < SLOWER));
    }
    assert!(compare(|| Controller::Always(0), &[0.9]).iter().any(|found| found.of_best < 0.5));
}

#[test]
fn it_goes_when_agreement_goes_and_comes_when_it_comes() {
    for (world, requests) in [(CPU, 1), (CPU, 4), (GPU, 1), (GPU, 16), (GPU, 64)] {
        let comes = run(world, requests, 1600, |_, step| if step < 600 { 0.0 } else { 0.9 }, auto());
        let mean = comes.nodes.iter().sum::<f64>() / requests as f64;
        assert!(mean > 0.7, "{requests}: {mean}");
        assert!(comes.of_plain() > 1.1, "{requests}: {}", comes.of_plain());
        let goes = run(world, requests, 1600, |_, step| if step < 600 { 0.9 } else { 0.0 }, auto());
        let mean = goes.nodes.iter().sum::<f64>() / requests as f64;
        assert!(mean < 0.3, "{requests}: {mean}");
        let often = run(world, requests, 1600, |_, step| if step % 400 < 200 { 0.9 } else { 0.0 }, auto());
        assert!(often.of_plain() > 1.0, "{requests}: {}", often.of_plain());
    }
}

#[test]
fn requests_are_told_apart() {
    let run = run(CPU, 4, 1000, |request, _| [0.9, 0.0, 0.5, 0.9][request], auto());
    assert!(run.nodes[0] > 2.0 && run.nodes[3] > 2.0, "{:?}", run.nodes);
    assert!(run.nodes[1] < 0.5, "{:?}", run.nodes);
    assert!(run.nodes[2] < run.nodes[0], "{:?}", run.nodes);
}

#[test]
fn steps_that_grow_slower_do_not_deceive_it() {
    for drift in [-0.5, 1.0] {
        for agreement in [0.0, 0.3, 0.5] {
            for (world, requests) in [(World { step: bound, ..CPU }, 4), (CPU, 16), (GPU, 16)] {
                let run = run(World { drift, ..world }, requests, 2000, |_, _| agreement, auto());
                assert!(run.of_plain() > 0.975, "{drift}, {agreement}, {requests}: {}", run.of_plain());
            }
        }
    }
}

#[test]
fn what_is_tried_at_first_costs_little() {
    for (world, requests) in
        [(World { step: bound, ..CPU }, 4), (World { step: bound, ..CPU }, 16), (CPU, 16), (CPU, 64)]
    {
        for agreement in [0.1, 0.3] {
            let run = run(world, requests, 64, |_, _| agreement, auto());
            assert!(run.of_plain() > 0.96, "{requests}, {agreement}: {}", run.of_plain());
        }
    }
}

/// The first draft of all touches new memory, and the first of an answer reads its prompt: neither
/// is the cost of drafts.
#[test]
fn a_slow_first_draft_is_not_the_last() {
    let mut adapt = Adapt::new(AdaptOptions { most_nodes: 4, fixed: None });
    let (mut out, mut nodes, mut steps_with_drafts) = (Vec::new(), 0, 0);
    for step in 0..400 {
        let id = RequestId(step / 100);
        adapt.note_gap(Duration::ZERO);
        adapt.note_step(1 + nodes, Duration::from_micros(1000 + 100 * nodes as u64), true);
        if nodes > 0 {
            steps_with_drafts += 1;
            adapt.note_walk(id, &Draft::chain(0..nodes as u32), &[0, 1, 2, 3][..nodes]);
        }
        let is_first = nodes == 0;
        adapt.most(&[id], 0, &mut out);
        nodes = out[0];
        let cold = if steps_with_drafts == 0 { 50_000 } else { 3_000 };
        adapt.note_drafting(1, nodes, Duration::from_micros(if nodes > 0 && is_first { cold } else { 20 }));
    }
    assert!(steps_with_drafts > 300, "{steps_with_drafts} of 400");
}

#[test]
fn a_method_with_nothing_to_say_costs_nothing() {
    for world in [World { speaks: 0.0, ..CPU }, World { speaks: 0.0, ..GPU }] {
        let run = run(world, 1, 2000, |_, _| 0.0, auto());
        assert!(run.of_plain() > 0.99, "{}", run.of_plain());
    }
}

#[test]
fn a_fixed_number_stays() {
    let mut adapt = Adapt::new(AdaptOptions { most_nodes: 5, fixed: Some(3) });
    let (ids, mut nodes) = ([RequestId(1), RequestId(2)], Vec::new());
    for _ in 0..50 {
        adapt.most(&ids, 0, &mut nodes);
        assert_eq!(nodes, [3, 3]);
        adapt.note_step(8, Duration::from_millis(90), true);
        adapt.note_walk(RequestId(1), &Draft::chain([1, 2, 3]), &[]);
    }
    assert!(adapt.expects());
    adapt.most(&[], 0, &mut nodes);
    assert!(nodes.is_empty());
    let mut most = Adapt::new(AdaptOptions { most_nodes: 5, fixed: Some(9) });
    most.most(&ids, 0, &mut nodes);
    assert_eq!(nodes, [5, 5]);
}

#[test]
fn requests_come_and_go() {
    let mut adapt = Adapt::new(AdaptOptions { most_nodes: MOST, fixed: None });
    let mut nodes = Vec::new();
    for step in 0..400_u64 {
        let ids: Vec<RequestId> = (step / 7..step / 7 + 1 + step % 5).map(RequestId).collect();
        let rows = ids.len() + nodes.iter().sum::<usize>();
        adapt.note_step(rows, Duration::from_micros(100 + rows as u64), step % 11 > 0);
        for id in &ids {
            adapt.note_walk(*id, &Draft::chain([1, 2]), &[0][..(step % 2) as usize]);
        }
        adapt.most(&ids, 0, &mut nodes);
        assert_eq!(nodes.len(), ids.len());
        assert!(nodes.iter().all(|&nodes| nodes <= MOST));
        adapt.forget(RequestId(step / 7));
    }
    assert!(adapt.requests.len() < 10);
}
