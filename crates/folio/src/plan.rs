//! `folio plan`: prints the memory plan of a model without loading it.

use anyhow::Result;
use folio_session::{Assets, Drafting, Plan, Target};

use crate::args::PlanArgs;
use crate::serve;

pub fn main(args: &PlanArgs) -> Result<()> {
    // The plan of a server with these flags.
    let mut options = args.model.engine.options()?;
    options.memory.bodies = Some(serve::bodies(folio_server::Limits::default().body_bytes, None));
    let mut assets = Assets::open(args.model.model.as_deref(), &options)?;
    assets.quantize(options.quantize)?;
    let drafting = Drafting::open(&assets, &options)?;
    let (target, _) = Target::choose(&options)?;
    let plan = Plan::new(&assets, drafting.as_ref(), &options, &target)?;
    match args.json {
        true => outln!("{}", plan.to_json(&assets.name)),
        false => out!("{}", plan.to_text(&assets.name)),
    }
}
