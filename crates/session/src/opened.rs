//! A model opened and planned: everything that loading needs, with nothing loaded yet.

use anyhow::Result;

use crate::assets::Assets;
use crate::drafting::Drafting;
use crate::options::Options;
use crate::packed::PackedCache;
use crate::plan::Plan;
use crate::target::Target;

/// A model that may be loaded: its files, the drafting method beside it, and a plan that fits.
pub struct Opened {
    pub assets: Assets,
    /// The drafting method, if the options ask for one.
    pub drafting: Option<Drafting>,
    /// The cache of its packed weights, if there is one.
    pub(crate) packed: Option<PackedCache>,
    pub plan: Plan,
    pub target: Target,
    /// A reason to doubt the plan, if the options say to ignore it.
    pub warning: Option<String>,
}

impl Opened {
    /// Opens all parts of the model and plans its memory. If the plan shortens the context, the
    /// model is opened again for it.
    pub fn new(mut assets: Assets, options: &Options, target: Target) -> Result<Self> {
        assets.quantize(options.quantize)?;
        let drafting = Drafting::open(&assets, options)?;
        let packed = PackedCache::find(&assets, options, &target);
        let plan = Plan::new(&assets, drafting.as_ref(), options, &target)?;
        let warning = plan.check(options.memory.unchecked)?;
        if plan.shrunk_from.is_some() {
            assets = assets.reopen(plan.max_model_len)?;
            packed.iter().for_each(|packed| packed.prepare(&assets.model));
        }
        Ok(Self { assets, drafting, packed, plan, target, warning })
    }
}
