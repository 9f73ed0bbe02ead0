//! The mock model detects every wrong table, one by one.

use folio_scheduler::{
    Assignment, BlockId, GroupConfig, HostSlot, PromptTargets, RequestId, SchedulerConfig, StepPlan, Transfer,
};
use folio_simulator::{
    Sampling, Truth,
    model::{Model, Output},
};

const WINDOW: usize = 6;

/// Two groups of four-token blocks, the second with a window.
fn model() -> Model {
    let mut config = SchedulerConfig::new(vec![8]);
    config.block_tokens = 4;
    config.groups[0].host_slots = 2;
    config.groups.push(GroupConfig { window: Some(WINDOW), ..GroupConfig::new(8) });
    let mut model = Model::new(&config);
    model.admit(RequestId(1), Sampling::default());
    model
}

fn blocks(ids: &[u32]) -> Vec<BlockId> {
    ids.iter().map(|&id| BlockId(id)).collect()
}

fn rows(first: usize, tokens: &[u32], tables: [&[u32]; 2]) -> Assignment {
    Assignment {
        id: RequestId(1),
        first,
        tokens: tokens.to_vec(),
        awaits_token: false,
        num_drafts: 0,
        parents: Vec::new(),
        samples: true,
        prompt_targets: PromptTargets::default(),
        tables: tables.map(blocks).to_vec().into(),
    }
}

fn run(model: &mut Model, transfers: Vec<Transfer>, assignment: Assignment) -> Output {
    let plan = StepPlan { transfers, assignments: vec![assignment], ..StepPlan::default() };
    let fault = model.run_transfers(&plan.transfers);
    let output = model.run_rows(&plan);
    Output { fault: fault.or(output.fault.clone()), ..output }
}

fn truth(tokens: &[u32]) -> Truth {
    Truth::new(&[None, Some(WINDOW)], 0, tokens)
}

#[test]
fn chunks_read_what_the_whole_reads() {
    let prompt: Vec<u32> = (10..19).collect();
    let mut model = model();
    let first = run(&mut model, vec![], rows(0, &prompt[..5], [&[3, 1], &[2, 4]]));
    let second = run(&mut model, vec![], rows(5, &prompt[5..], [&[3, 1, 0], &[2, 4, 5]]));
    let digests = [first.digests, second.digests].concat();
    assert_eq!(digests, truth(&prompt).digests());
    assert_eq!(second.results[0].token, Some(truth(&prompt).next(Sampling::default())));
}

#[test]
fn any_wrong_entry_changes_what_is_read() {
    let prompt: Vec<u32> = (10..19).collect();
    let right = truth(&prompt).digests()[8];
    for tables in [[[0, 1, 6], [2, 4, 5]], [[3, 0, 6], [2, 4, 5]], [[1, 3, 6], [2, 4, 5]], [[3, 1, 6], [2, 0, 5]]] {
        let mut model = model();
        run(&mut model, vec![], rows(0, &prompt[..8], [&[3, 1], &[2, 4]]));
        let output = run(&mut model, vec![], rows(8, &prompt[8..], [&tables[0], &tables[1]]));
        assert_ne!(output.digests, [right], "{tables:?}");
    }
    let mut model = model();
    run(&mut model, vec![], rows(0, &prompt[..8], [&[3, 1], &[2, 4]]));
    let gone = BlockId::GONE.0;
    let output = run(&mut model, vec![], rows(8, &prompt[8..], [&[3, 1, 6], &[gone, 4, 5]]));
    let fault = output.fault.expect("position 3 is still in the window of the row at 8");
    assert!(fault.contains("gone"), "{fault}");
}

#[test]
fn what_has_left_the_window_is_not_read() {
    let prompt: Vec<u32> = (10..20).collect();
    let mut model = model();
    run(&mut model, vec![], rows(0, &prompt[..9], [&[3, 1, 0], &[2, 4, 5]]));
    let output = run(&mut model, vec![], rows(9, &prompt[9..], [&[3, 1, 0], &[BlockId::GONE.0, 4, 5]]));
    assert_eq!((output.fault, output.digests), (None, vec![truth(&prompt).digests()[9]]));
}

#[test]
fn transfers_move_whole_blocks_before_the_rows() {
    let prompt: Vec<u32> = (10..15).collect();
    let mut model = model();
    run(&mut model, vec![], rows(0, &prompt[..4], [&[3], &[2]]));
    let (slot, group) = (HostSlot(1), 0);
    let transfers = vec![
        Transfer::Save { group, from: BlockId(3), to: slot },
        Transfer::Load { group, from: slot, to: BlockId(6) },
        Transfer::Copy { group, from: BlockId(6), to: BlockId(7) },
    ];
    let output = run(&mut model, transfers, rows(4, &prompt[4..], [&[7, 1], &[2, 4]]));
    assert_eq!((output.fault, output.digests), (None, vec![truth(&prompt).digests()[4]]));
    let outside = vec![Transfer::Load { group: 1, from: HostSlot(0), to: BlockId(0) }];
    assert!(model.run_transfers(&outside).is_some(), "that group has no host tier");
}

#[test]
fn drafts_hold_as_far_as_they_are_the_models_own() {
    let prompt = [10, 11];
    let mut truth = truth(&prompt);
    let right: Vec<u32> = (0..4)
        .map(|_| {
            let next = truth.next(Sampling::default());
            truth.push(next);
            next
        })
        .collect();
    for good in 0..=3 {
        let mut drafts = right[..3].to_vec();
        if let Some(draft) = drafts.get_mut(good) {
            *draft += 1;
        }
        let rows = rows(0, &[&prompt[..], &drafts].concat(), [&[0, 1], &[0, 1]]);
        let assignment = Assignment { num_drafts: 3, parents: vec![None, Some(0), Some(1)], ..rows };
        let output = run(&mut model(), vec![], assignment);
        assert_eq!((&output.results[0].accepted[..], output.results[0].token), (&right[..good], Some(right[good])));
        assert_eq!(output.moved, 0);
    }
}

/// The right path is nodes 1, 3 and 4 of a tree that is longer than the window: later rows must
/// read it as a chain.
#[test]
fn a_path_of_a_tree_is_read_as_a_chain_in_its_step_and_behind_it() {
    let prompt: Vec<u32> = (10..17).collect();
    let mut truth = truth(&prompt);
    let right: Vec<u32> = (0..5)
        .map(|_| {
            let next = truth.next(Sampling::default());
            truth.push(next);
            next
        })
        .collect();
    let tables: [&[u32]; 2] = [&[3, 1, 0], &[2, 4, 5]];
    let drafts = [right[0] + 1, right[0], right[1] + 1, right[1], right[2]];
    let parents = vec![None, None, Some(1), Some(1), Some(3)];
    let mut model = model();
    run(&mut model, vec![], rows(0, &prompt[..6], [&[3, 1], &[2, 4]]));
    let tree = rows(6, &[&prompt[6..], &drafts].concat(), tables);
    let output = run(&mut model, vec![], Assignment { num_drafts: 5, parents, ..tree });
    assert_eq!((output.fault, output.moved), (None, 3));
    assert_eq!((&output.results[0].accepted[..], output.results[0].token), (&right[..3], Some(right[3])));
    let digest = |row: usize| output.digests[row];
    assert_eq!([0, 2, 4, 5].map(digest), truth.digests()[6..10]);
    let behind = run(&mut model, vec![], rows(10, &right[3..4], tables));
    assert_eq!((behind.digests, behind.results[0].token), (truth.digests()[10..11].to_vec(), Some(right[4])));
}
