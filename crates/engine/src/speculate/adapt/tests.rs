//! A world with costs and agreement as they are on real machines, in which speculating must never lose and mostly win.

use super::*;

/// What the machine does.
#[derive(Clone, Copy)]
struct World {
    /// Seconds of a step with so many rows.
    step: fn(usize) -> f64,
    /// Seconds a node of the longest draft.
    drafting: f64,
    /// Seconds that a step waits that is not planned ahead.
    gap: f64,
    /// Whether the method has anything to say.
    speaks: f64,
    noise: bool,
}

/// Two cores and a small model.
fn cpu(rows: usize) -> f64 {
    4.0e-3 + 0.35e-3 * (rows - 1) as f64
}

/// Reading the weights is all there is to it for long.
fn gpu(rows: usize) -> f64 {
    3.9e-3 + 0.01e-3 * rows.min(128) as f64 + 0.05e-3 * rows.saturating_sub(128) as f64
}

/// Every row costs the same.
fn bound(rows: usize) -> f64 {
    1e-3 + 1e-3 * rows as f64
}

/// Flat, and then a cliff: rows come in tiles of 16.
fn tiles(rows: usize) -> f64 {
    2e-3 * rows.div_ceil(16) as f64
}

const QUIET: World = World { step: cpu, drafting: 2e-6, gap: 40e-6, speaks: 1.0, noise: true };

struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as f64 + 0.5) / (1_u64 << 31) as f64
    }

    /// About one: a tenth up or down, and now and then a hiccup.
    fn noise(&mut self) -> f64 {
        let bell: f64 = (0..6).map(|_| self.next()).sum::<f64>() - 3.0;
        let hiccup = if self.next() < 0.02 { 1.0 + 4.0 * self.next() } else { 1.0 };
        (1.0 + 0.14 * bell).max(0.5) * hiccup
    }
}

/// Who decides: the one that is tested, or a number that never changes.
enum Controller {
    Auto(Box<Adapt>),
    Always(usize),
}

fn auto() -> Controller {
    Controller::Auto(Box::new(Adapt::new(AdaptOptions { most_nodes: 12, fixed: None })))
}

/// What came of a run.
struct Run {
    tokens: f64,
    seconds: f64,
    /// Mean nodes of each request, in the last quarter.
    nodes: Vec<f64>,
    /// The last step that asked for nothing.
    last_plain: usize,
    /// Part of the steps that verified anything.
    speculated: f64,
}

impl Run {
    fn rate(&self) -> f64 {
        self.tokens / self.seconds
    }
}

/// `agreement` of a request in a step.
fn run(world: World, requests: usize, steps: usize, agreement: impl Fn(usize, usize) -> f64, who: Controller) -> Run {
    let mut random = Random(7 + requests as u64);
    let ids: Vec<RequestId> = (0..requests as u64).map(RequestId).collect();
    let (mut who, mut nodes) = (who, Vec::new());
    let (mut asked, mut waits) = (vec![0; requests], false);
    let mut run = Run { tokens: 0.0, seconds: 0.0, nodes: vec![0.0; requests], last_plain: 0, speculated: 0.0 };
    for step in 0..steps {
        let drafts: Vec<Draft> = asked
            .iter()
            .map(|&nodes| if random.next() < world.speaks { Draft::chain(0..nodes as u32) } else { Draft::default() })
            .collect();
        let rows = requests + drafts.iter().map(Draft::len).sum::<usize>();
        // What counts in the end is what a step takes in the mean; what is seen of it is what the clock says.
        let gap = if waits { world.gap } else { 0.0 };
        run.seconds += (world.step)(rows) + gap;
        let mut noise = || if world.noise { random.noise() } else { 1.0 };
        let (took, gap) = ((world.step)(rows) * noise(), gap * noise());
        if let Controller::Auto(adapt) = &mut who {
            adapt.note_gap(Duration::from_secs_f64(gap));
            adapt.note_step(rows, Duration::from_secs_f64(took), true);
        }
        for (request, draft) in drafts.iter().enumerate() {
            let agreement = agreement(request, step);
            let held = (0..draft.len()).take_while(|_| random.next() < agreement).count();
            run.tokens += (0..=draft.len() as i32).map(|depth| agreement.powi(depth)).sum::<f64>();
            if step >= steps * 3 / 4 {
                run.nodes[request] += draft.len() as f64 / (steps - steps * 3 / 4) as f64;
            }
            if let Controller::Auto(adapt) = &mut who
                && !draft.is_empty()
            {
                adapt.note_walk(ids[request], draft, &(0..held as u16).collect::<Vec<_>>());
            }
        }
        if rows == requests {
            run.last_plain = step;
        } else {
            run.speculated += 1.0 / steps as f64;
        }
        match &mut who {
            Controller::Auto(adapt) => {
                let could_draft = waits;
                adapt.most(&ids, &mut nodes);
                waits = adapt.expects(ids[0]);
                assert!(could_draft || nodes.iter().all(|&nodes| nodes == 0), "the next step is under way");
                let took = world.drafting * nodes.iter().copied().max().unwrap_or(0) as f64;
                run.seconds += took;
                let took = took * random.noise();
                adapt.note_drafting(requests, nodes.iter().sum(), Duration::from_secs_f64(took));
                asked.copy_from_slice(&nodes);
            }
            Controller::Always(nodes) => {
                asked.fill(*nodes);
                waits = *nodes > 0;
                run.seconds += world.drafting * *nodes as f64;
            }
        }
    }
    run
}

const STEPS: usize = 2000;
const BATCHES: [usize; 4] = [1, 4, 16, 64];

fn worlds() -> Vec<(&'static str, World)> {
    vec![
        ("cpu", QUIET),
        ("cpu, draft model", World { drafting: 0.7e-3, ..QUIET }),
        ("gpu", World { step: gpu, gap: 200e-6, ..QUIET }),
        ("gpu, draft model", World { step: gpu, gap: 200e-6, drafting: 0.4e-3, ..QUIET }),
        ("bound", World { step: bound, ..QUIET }),
        ("tiles", World { step: tiles, ..QUIET }),
        ("seldom", World { speaks: 0.1, ..QUIET }),
        ("seldom, gpu", World { step: gpu, gap: 200e-6, speaks: 0.1, ..QUIET }),
    ]
}

type Found = (String, f64, f64);

/// For every world, batch and agreement: how the controller compares with no speculation, and with the best number.
fn compare(controller: impl Fn() -> Controller, agreement: fn(f64, usize) -> f64, seen: &mut Vec<Found>) {
    for (name, world) in worlds() {
        for requests in BATCHES {
            for level in [0.0, 0.3, 0.6, 0.9] {
                let rate = |who| run(world, requests, STEPS, |_, step| agreement(level, step), who).rate();
                let fixed = |nodes| {
                    run(world, requests, 200, |_, step| agreement(level, step * STEPS / 200), Controller::Always(nodes))
                        .rate()
                };
                let always = [0, 1, 2, 3, 4, 5, 6, 8, 12].map(fixed);
                let best = always.iter().copied().fold(0.0, f64::max);
                let auto = rate(controller());
                let place = format!("{name}, {requests} requests, agreement {level}, best {:.2}", best / always[0]);
                seen.push((place, auto / always[0], auto / best));
            }
        }
    }
}

#[test]
fn speculation_is_never_slower_than_none() {
    let mut seen = Vec::new();
    compare(auto, |level, _| level, &mut seen);
    let slower: Vec<_> = seen.iter().filter(|found| found.1 < 0.985).collect();
    assert!(slower.is_empty(), "{slower:?}");
}
