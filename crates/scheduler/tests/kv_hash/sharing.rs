//! Tokens that requests share are computed once: prefix hits, forks, windows, and the figures of
//! the prefix cache.

use folio_scheduler::{BlockId, GroupConfig, KvEvent, Medium, Miss, RequestId, SchedulerConfig};
use folio_simulator::reference;

use crate::harness::{Sim, tokens};

#[test]
fn a_hit_covers_full_blocks_and_never_the_last_token() {
    for (len, hit) in [(15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (48, 32), (49, 48)] {
        let mut sim = Sim::new(SchedulerConfig::new(vec![64]));
        for _ in 0..2 {
            sim.add(tokens(3, len), 3);
            sim.run_to_end();
        }
        assert_eq!(sim.hit_tokens(), hit, "prompt of {len}");
    }
}

#[test]
fn an_answer_can_be_hit_like_a_prompt() {
    let mut sim = Sim::new(SchedulerConfig::new(vec![64]));
    let prompt = tokens(4, 20);
    sim.add(prompt.clone(), 30);
    sim.run_to_end();
    let answer = reference(&[None], &prompt, 30, Default::default());
    sim.add([prompt, answer, vec![1, 2, 3]].concat(), 4);
    sim.run_to_end();
    assert_eq!(sim.hit_tokens(), 48, "49 tokens were computed, so three blocks are full");
}

#[test]
fn other_salts_never_share() {
    let mut sim = Sim::new(SchedulerConfig::new(vec![64]));
    for salt in 0..3 {
        sim.add_with(tokens(5, 40), 2, |r| r.cache_salt = salt);
        sim.run_to_end();
    }
    assert_eq!(sim.hit_tokens(), 0);
}

#[test]
fn samples_of_one_prompt_compute_it_once() {
    for (depth, len) in [(1, 37), (1, 32), (2, 37), (1, 5)] {
        let mut sim = Sim::deep(SchedulerConfig::new(vec![64]), depth);
        let first = sim.add(tokens(6, len), 9);
        for _ in 0..3 {
            sim.add_with(tokens(6, len), 9, |r| r.fork_of = Some(first));
        }
        sim.run_to_end();
        // The prompt once, its last token for each fork, and every answer except its last token.
        assert_eq!(sim.computed(), (len + 3 + 4 * 8) as u64, "a prompt of {len}, {depth} in flight");
        assert_eq!(sim.driver.coverage.copies, 3, "the partial block, for each fork");
    }
}

#[test]
fn a_fork_goes_on_from_a_running_answer() {
    let mut sim = Sim::new(SchedulerConfig::new(vec![64]));
    let first = sim.add(tokens(7, 20), 40);
    for _ in 0..15 {
        sim.step();
    }
    let so_far = sim.driver.clients()[&first].truth.tokens().to_vec();
    let before = sim.computed();
    sim.add_with([so_far.clone(), vec![1, 2]].concat(), 3, |r| r.fork_of = Some(first));
    sim.step();
    sim.step();
    // The newest token, which the fork waits for; then the next one, and two of the fork.
    assert_eq!(sim.computed() - before, 1 + 1 + 2);
    sim.run_to_end();
}

fn windowed() -> SchedulerConfig {
    let mut config = SchedulerConfig::new(vec![64]);
    config.groups.push(GroupConfig { window: Some(20), ..GroupConfig::new(16) });
    config.max_chunk = Some(16);
    config
}

#[test]
fn blocks_behind_a_window_are_freed_and_a_later_hit_still_works() {
    for depth in [1, 2] {
        let mut sim = Sim::deep(windowed(), depth);
        let prompt = tokens(8, 200);
        sim.add(prompt.clone(), 20);
        let mut most = 0;
        let mut gone = 0;
        while !sim.driver.is_idle() {
            sim.driver.begin_turn().expect("sound");
            most = most.max(sim.driver.stats().groups[1].blocks_used);
            let tables = sim.driver.newest_plan().into_iter().flat_map(|p| &p.assignments).map(|a| &a.tables);
            gone = gone.max(tables.map(|t| t[1].iter().filter(|b| **b == BlockId::GONE).count()).max().unwrap_or(0));
            sim.driver.end_turn().expect("sound");
        }
        assert!(most <= 5, "a window of 20 and a chunk of 16 held {most} blocks");
        assert!(gone >= 10, "{gone} blocks are behind the window");
        sim.add(prompt, 5);
        sim.run_to_end();
        assert_eq!(sim.hit_tokens(), 192, "all full blocks, of which the window group needs two");
    }
}

#[test]
fn a_window_group_that_lost_its_window_limits_the_hit() {
    let mut config = windowed();
    config.groups[1].blocks = 8;
    let mut sim = Sim::new(config);
    let prompt = tokens(9, 100);
    sim.add(prompt.clone(), 2);
    sim.run_to_end();
    // Other requests use up the small pool of the window group; the large pool still has the
    // prompt.
    sim.add(tokens(10, 100), 2);
    sim.run_to_end();
    let before = sim.hit_tokens();
    sim.add(prompt, 2);
    sim.run_to_end();
    assert_eq!(sim.hit_tokens() - before, 0, "nothing but a window's worth would do");
}

#[test]
fn a_miss_says_why() {
    let mut config = SchedulerConfig::new(vec![8]);
    let miss = |config: &SchedulerConfig, requests: &[(u64, usize, bool)]| {
        let mut sim = Sim::new(config.clone());
        let mut last = RequestId(0);
        for &(seed, len, logits) in requests {
            last = sim.add_with(tokens(seed, len), 2, |r| r.wants_prompt_logits = logits);
            sim.run_to_end();
        }
        let departed = sim.departure(last).departed.expect("it ran");
        (departed.cached_tokens, departed.miss)
    };
    assert_eq!(miss(&config, &[(1, 40, false)]), (0, Some(Miss::New)));
    assert_eq!(miss(&config, &[(1, 10, false)]), (0, Some(Miss::Short)));
    assert_eq!(miss(&config, &[(1, 40, false), (1, 40, false)]), (32, None));
    assert_eq!(miss(&config, &[(1, 40, false), (1, 40, true)]), (0, Some(Miss::PromptLogits)));
    let evicted = miss(&config, &[(1, 40, false), (2, 120, false), (1, 40, false)]);
    assert_eq!(evicted, (0, Some(Miss::Evicted)));
    config.prefix_caching = false;
    assert_eq!(miss(&config, &[(1, 40, false)]), (0, Some(Miss::Disabled)));
    let mut sim = Sim::new(config);
    let id = sim.add(tokens(1, 40), 2);
    sim.abort(id);
    assert_eq!(sim.departure(id).departed.expect("it was known").miss, Some(Miss::NeverRan));
}

#[test]
fn events_tell_what_is_stored_removed_and_cleared() {
    let mut config = SchedulerConfig::new(vec![4]);
    config.kv_events = true;
    let mut scheduler = folio_scheduler::Scheduler::new(config).expect("sound");
    let mut run = |id: u64, prompt: Vec<u32>| {
        let max_len = prompt.len() + 1;
        scheduler.add(folio_scheduler::NewRequest::new(RequestId(id), prompt, max_len), 0).expect("fits");
        let plan = scheduler.schedule(0);
        assert!(plan.assignments[0].samples);
        let result = folio_scheduler::RowResult { id: RequestId(id), accepted: Vec::new(), token: Some(1) };
        scheduler.commit(&[result], 1);
        scheduler.finish(RequestId(id)).expect("known");
        scheduler.take_events()
    };
    let prompt = tokens(1, 33);
    let first = run(0, prompt.clone());
    let [KvEvent::Stored { hashes, parent: None, tokens: stored, block_tokens: 16, medium: Medium::Device, group: 0 }] =
        &first[..]
    else {
        panic!("two blocks in one event: {first:?}")
    };
    assert_eq!((hashes.len(), stored.as_slice()), (2, &prompt[..32]));
    let again = run(1, [&prompt[..32], &tokens(2, 17)].concat());
    let [KvEvent::Stored { hashes: more, parent, tokens: stored, .. }] = &again[..] else { panic!("{again:?}") };
    assert_eq!((*parent, more.len(), stored.len()), (hashes.last().copied(), 1, 16), "behind the two");
    let other = run(2, tokens(3, 50));
    let removed = other.iter().filter_map(|event| match event {
        KvEvent::Removed { hashes, medium: Medium::Device, group: 0 } => Some(hashes.clone()),
        _ => None,
    });
    let removed: Vec<u64> = removed.flatten().collect();
    assert_eq!(removed, [more[0], hashes[1], hashes[0]], "tails first");
    scheduler.clear_cache();
    assert_eq!(scheduler.take_events(), [KvEvent::Cleared]);
}
