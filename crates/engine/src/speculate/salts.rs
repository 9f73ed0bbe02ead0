//! The owner of a request, and a method's data for each salt.
//!
//! Data learned from answers has visible effects: on the number of accepted drafts, which every
//! answer reports, and on its pace. It therefore belongs to the salt of the requests it was learned
//! from, as blocks of the prefix cache do: a request is affected by requests of its own salt, and
//! by nothing that others asked or were answered.
//!
//! Clients may name salts, so their number is bounded. Beyond the bound, the tenant with the most
//! salts loses the one that it has not used for longest: a tenant that names ever new salts
//! displaces its own.

use super::mix::Map;

/// The owner of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Owner {
    /// The tenant that its share of the data counts against.
    pub tenant: u64,
    /// Requests of different salts share nothing.
    pub salt: u64,
}

/// Most salts with data.
pub(super) const MOST_SALTS: usize = 256;

/// A value for each salt.
#[derive(Debug)]
pub(super) struct Salts<T> {
    entries: Map<u64, Entry<T>>,
    most: usize,
    clock: u64,
}

#[derive(Debug)]
struct Entry<T> {
    value: T,
    /// The tenant that used it last.
    tenant: u64,
    used: u64,
}

impl<T> Default for Salts<T> {
    fn default() -> Self {
        Self::new(MOST_SALTS)
    }
}

impl<T> Salts<T> {
    pub fn new(most: usize) -> Self {
        assert!(most > 0, "room for no salt");
        Self { entries: Map::default(), most, clock: 0 }
    }

    pub fn get(&self, salt: u64) -> Option<&T> {
        self.entries.get(&salt).map(|entry| &entry.value)
    }

    pub fn get_mut(&mut self, salt: u64) -> Option<&mut T> {
        self.entries.get_mut(&salt).map(|entry| &mut entry.value)
    }

    /// The value of a salt, noted as used now, and made if there is none.
    pub fn of(&mut self, owner: Owner, make: impl FnOnce() -> T) -> &mut T {
        self.clock += 1;
        if self.entries.len() >= self.most && !self.entries.contains_key(&owner.salt) {
            self.drop_one(owner.tenant);
        }
        let fresh = || Entry { value: make(), tenant: owner.tenant, used: 0 };
        let entry = self.entries.entry(owner.salt).or_insert_with(fresh);
        (entry.tenant, entry.used) = (owner.tenant, self.clock);
        &mut entry.value
    }

    /// All values, with the tenant that used each last.
    pub fn values(&self) -> impl Iterator<Item = (u64, &T)> {
        self.entries.values().map(|entry| (entry.tenant, &entry.value))
    }

    pub fn values_mut(&mut self) -> impl Iterator<Item = (u64, &mut T)> {
        self.entries.values_mut().map(|entry| (entry.tenant, &mut entry.value))
    }

    /// Makes room for a salt of a tenant.
    fn drop_one(&mut self, tenant: u64) {
        let mut of_tenants: Map<u64, usize> = [(tenant, 1)].into_iter().collect();
        self.entries.values().for_each(|entry| *of_tenants.entry(entry.tenant).or_default() += 1);
        let order = |entry: &Entry<T>| (std::cmp::Reverse(of_tenants[&entry.tenant]), entry.used);
        if let Some((&salt, _)) = self.entries.iter().min_by_key(|(_, entry)| order(entry)) {
            self.entries.remove(&salt);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(salts: &Salts<u32>) -> Vec<u64> {
        let mut all: Vec<u64> = salts.entries.keys().copied().collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn each_salt_has_its_own_and_the_longest_unused_goes() {
        let mut salts = Salts::new(3);
        let owner = |salt| Owner { tenant: 1, salt };
        for salt in [5, 6, 7] {
            *salts.of(owner(salt), || 10) += salt as u32;
        }
        assert_eq!([5, 6, 7, 8].map(|salt| salts.get(salt).copied()), [Some(15), Some(16), Some(17), None]);
        *salts.of(owner(5), || 0) += 1;
        salts.of(owner(8), || 0);
        assert_eq!(names(&salts), [5, 7, 8]);
        assert_eq!(salts.get(5), Some(&16));
        // Looking is not a use.
        assert!(salts.get_mut(7).is_some());
        salts.of(owner(9), || 0);
        assert_eq!(names(&salts), [5, 8, 9]);
    }

    #[test]
    fn a_tenant_of_many_salts_displaces_its_own() {
        let mut salts = Salts::new(4);
        salts.of(Owner { tenant: 2, salt: 1 }, || 0);
        for salt in 100..1000 {
            salts.of(Owner { tenant: 3, salt }, || 0);
        }
        assert_eq!(names(&salts), [1, 997, 998, 999]);
        salts.of(Owner { tenant: 2, salt: 2 }, || 0);
        salts.of(Owner { tenant: 2, salt: 3 }, || 0);
        assert_eq!(names(&salts), [2, 3, 998, 999], "as many for each");
        salts.of(Owner { tenant: 4, salt: 4 }, || 0);
        assert_eq!(names(&salts), [2, 3, 4, 999], "of those who have the most, the longest unused");
    }
}
