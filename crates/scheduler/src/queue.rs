//! Who waits, and who is next: one line a tenant, in order of arrival as priority shifts it; between tenants, whoever has
//! had the fewest tokens for its weight.
//!
//! A level of priority is worth a fixed time of waiting. So two requests never change places while they wait, the line is
//! sorted once, and nobody waits for ever: that is all of aging.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, binary_heap::PeekMut},
    ops::Bound,
};

use crate::{Nanos, NewRequest, request::Request};

/// Place in line: the time of arrival, moved by priority and deadline; then the order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct OrderKey {
    virtual_arrival: i64,
    arrival: u64,
}

impl OrderKey {
    /// A deadline counts as an arrival one level of priority before it, if that is sooner.
    pub fn new(request: &NewRequest, now: Nanos, arrival: u64, aging: Nanos) -> Self {
        let signed = |nanos: Nanos| i64::try_from(nanos).unwrap_or(i64::MAX);
        let level = signed(aging);
        let by_priority = signed(now).saturating_add(level.saturating_mul(i64::from(request.priority)));
        let by_deadline = request.deadline.map_or(i64::MAX, |deadline| signed(deadline).saturating_sub(level));
        Self { virtual_arrival: by_priority.min(by_deadline), arrival }
    }
}

/// Place among those who run: tenants by what they have had for their weight, the least first, and then each tenant's own
/// requests as they were in line. So a priority moves a request before others of its tenant, and before nobody else's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    rank: u32,
    tenant: u64,
    key: OrderKey,
}

impl Place {
    pub fn of(request: &Request) -> Self {
        Self { rank: request.rank, tenant: request.tenant, key: request.key }
    }
}

/// Tokens times this over weight: a weight divides without much loss.
const SCALE: u128 = 1 << 20;

#[derive(Debug)]
struct Tenant {
    weight: u32,
    /// Tokens computed for it, those computed again not counted twice, scaled by weight; comparable between tenants.
    served: u128,
    num_running: usize,
    /// Its place among the tenants whose requests run, as of the last step.
    rank: u32,
    line: BTreeMap<OrderKey, Box<Request>>,
}

#[derive(Debug, Default)]
pub(crate) struct Waiting {
    /// Those with a request waiting or running.
    tenants: BTreeMap<u64, Tenant>,
    len: usize,
    num_tokens: usize,
}

/// A search for candidates: how far it has come in each line.
#[derive(Debug)]
pub(crate) struct Cursor {
    /// Tenants with a line and what they had had when last looked at, the least served first.
    due: BinaryHeap<Reverse<(u128, u64)>>,
    passed: BTreeMap<u64, OrderKey>,
}

impl Cursor {
    /// Those up to `key` in the tenant's line have been seen.
    pub fn pass(&mut self, tenant: u64, key: OrderKey) {
        self.passed.insert(tenant, key);
    }
}

impl Waiting {
    pub fn len(&self) -> usize {
        self.len
    }

    /// Tokens of all who wait.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    pub fn iter(&self) -> impl Iterator<Item = &Request> {
        self.tenants.values().flat_map(|tenant| tenant.line.values().map(|r| &**r))
    }

    /// A new request joins its tenant's line.
    pub fn push(&mut self, request: Box<Request>, weight: u32) {
        let weight = weight.max(1);
        let fresh = || Tenant { weight, served: 0, num_running: 0, rank: u32::MAX, line: BTreeMap::new() };
        let tenant = self.tenants.entry(request.tenant).or_insert_with(fresh);
        tenant.weight = weight;
        // As if it had run: `put_back` is told of requests that did.
        tenant.num_running += 1;
        self.catch_up(request.tenant);
        self.put_back(request);
    }

    /// A tenant with nobody in line has saved up nothing while others waited: it goes on where the least served of those
    /// who wait is. When nobody waits, what was before is forgotten, and all are level.
    pub fn catch_up(&mut self, id: u64) {
        if self.tenants.get(&id).is_none_or(|tenant| !tenant.line.is_empty()) {
            return;
        }
        let others = || self.tenants.iter().filter(|&(&other, _)| other != id).map(|(_, tenant)| tenant);
        let waits = |tenant: &&Tenant| !tenant.line.is_empty();
        let least = others().filter(waits).map(|tenant| tenant.served).min();
        let level = least.or_else(|| others().map(|tenant| tenant.served).max()).unwrap_or(0);
        let tenant = self.tenants.get_mut(&id).expect("a tenant with a running request is known");
        tenant.served = tenant.served.max(level);
    }

    /// A request taken out of line comes back to its old place.
    pub fn put_back(&mut self, request: Box<Request>) {
        let tenant = self.tenants.get_mut(&request.tenant).expect("a tenant with a running request is known");
        tenant.num_running -= 1;
        self.len += 1;
        self.num_tokens += request.tokens.len();
        tenant.line.insert(request.key, request);
    }

    /// Before everyone in line. Until the search is over nobody joins, and nobody is refunded.
    pub fn cursor(&self) -> Cursor {
        let waits = |(_, tenant): &(&u64, &Tenant)| !tenant.line.is_empty();
        let due: Vec<_> = self.tenants.iter().filter(waits).map(|(&id, t)| Reverse((t.served, id))).collect();
        Cursor { due: due.into(), passed: BTreeMap::new() }
    }

    /// The first in line that the cursor has not passed, of the tenant that is due.
    pub fn next(&self, cursor: &mut Cursor) -> Option<(u64, OrderKey)> {
        while let Some(mut due) = cursor.due.peek_mut() {
            let Reverse((served, id)) = *due;
            let Some(tenant) = self.tenants.get(&id) else {
                PeekMut::pop(due);
                continue;
            };
            if served != tenant.served {
                *due = Reverse((tenant.served, id));
                continue;
            }
            let behind = |&passed: &OrderKey| (Bound::Excluded(passed), Bound::Unbounded);
            let key = match cursor.passed.get(&id).map(behind) {
                Some(range) => tenant.line.range(range).next(),
                None => tenant.line.first_key_value(),
            };
            match key {
                Some((&key, _)) => return Some((id, key)),
                None => PeekMut::pop(due),
            };
        }
        None
    }

    /// Lets `change` work on a request in line, which may learn a token.
    pub fn change<T>(&mut self, tenant: u64, key: OrderKey, change: impl FnOnce(&mut Request) -> T) -> Option<T> {
        let request = self.tenants.get_mut(&tenant)?.line.get_mut(&key)?;
        self.num_tokens -= request.tokens.len();
        let result = change(request);
        self.num_tokens += request.tokens.len();
        Some(result)
    }

    /// Takes a request out of line: to run, or to be put back at once.
    pub fn take(&mut self, tenant: u64, key: OrderKey) -> Option<Box<Request>> {
        let tenant = self.tenants.get_mut(&tenant)?;
        let request = tenant.line.remove(&key)?;
        tenant.num_running += 1;
        self.len -= 1;
        self.num_tokens -= request.tokens.len();
        Some(request)
    }

    /// A request of the tenant, taken out of line before, has ended. Tenants without requests are not remembered.
    pub fn ended(&mut self, id: u64) {
        let tenant = self.tenants.get_mut(&id).expect("a tenant with a running request is known");
        tenant.num_running -= 1;
        if tenant.num_running == 0 && tenant.line.is_empty() {
            self.tenants.remove(&id);
        }
    }

    /// The tenant has been given `tokens` of a step.
    pub fn charge(&mut self, id: u64, tokens: usize) {
        let tenant = self.tenants.get_mut(&id).expect("a tenant with a running request is known");
        tenant.served += tokens as u128 * SCALE / u128::from(tenant.weight);
    }

    /// Of the tokens charged, `tokens` were not computed after all.
    pub fn refund(&mut self, id: u64, tokens: usize) {
        let tenant = self.tenants.get_mut(&id).expect("a tenant with a running request is known");
        tenant.served = tenant.served.saturating_sub(tokens as u128 * SCALE / u128::from(tenant.weight));
    }

    /// Ranks tenants anew by what they have had; whether any place has changed. New tenants come last until then.
    pub fn rank(&mut self) -> bool {
        if self.tenants.len() < 2 {
            return false;
        }
        let mut tenants = Vec::new();
        for tenant in self.tenants.values_mut() {
            match tenant.num_running {
                0 => tenant.rank = u32::MAX,
                _ => tenants.push(tenant),
            }
        }
        // Of equals the one with the lower number, as in line.
        tenants.sort_by_key(|tenant| tenant.served);
        let mut has_changed = false;
        for (rank, tenant) in (0..).zip(tenants) {
            has_changed |= tenant.rank != rank;
            tenant.rank = rank;
        }
        has_changed
    }

    /// A tenant's own among those whose requests run.
    pub fn rank_of(&self, tenant: u64) -> u32 {
        self.tenants.get(&tenant).map_or(u32::MAX, |tenant| tenant.rank)
    }

    /// The place that a request would have among those who run.
    pub fn place(&self, tenant: u64, key: OrderKey) -> Place {
        Place { rank: self.rank_of(tenant), tenant, key }
    }

    /// How many requests of each tenant run, for the check.
    pub fn num_running(&self) -> BTreeMap<u64, usize> {
        self.tenants.iter().map(|(&id, tenant)| (id, tenant.num_running)).collect()
    }
}
