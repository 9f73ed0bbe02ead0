//! Counters of everything that a run exercised, so that a run with too little variety shows.

/// Declares the counters once, with their sum, their names and their values.
macro_rules! counters {
    ($($name:ident),* $(,)?) => {
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct Coverage { $(pub $name: u64),* }

        impl Coverage {
            pub fn add(&mut self, other: &Coverage) {
                $(self.$name += other.$name;)*
            }

            pub fn rows(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),*]
            }
        }
    };
}

counters!(
    steps,
    empty_plans,
    overlapped_steps,
    rows,
    requests,
    refused,
    ended_by_length,
    ended_by_stop,
    aborted_waiting,
    aborted_running,
    aborted_in_flight,
    stalled,
    expired,
    crashed,
    failed_steps,
    failed_requests,
    failed_rows,
    shortages,
    preemptions,
    preempted_in_flight,
    hit_tokens,
    host_hit_tokens,
    duplicates,
    forks,
    copies,
    saves,
    loads,
    stores,
    stores_failed,
    fetches,
    fetches_failed,
    chunks_lost,
    drafts_planned,
    drafts_accepted,
    drafts_cut,
    draft_trees,
    draft_blocks,
    kv_moves,
    preempted_with_drafts,
    aborted_with_drafts,
    failed_with_drafts,
    awaited_rows,
    chunked_prompts,
    prompt_targets,
    gone_entries,
    clock_jumps,
    drains,
    restarts,
    cache_clears,
);
