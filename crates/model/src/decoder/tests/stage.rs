use super::*;

fn stage<B: Backend>(backend: B, model: &OpenModel, stage: &Stage) -> Decoder<B> {
    let limits = limits(stage.spec(&model.spec).kv_groups().len());
    Decoder::load_stage(backend, model, stage, limits, &mut |_| {}).unwrap()
}

/// Stages one after the other compute the same as the whole model, bit for bit, tied or not, with
/// one layer group or two.
#[test]
fn stages_add_up_to_the_whole() {
    for config in [config("llama", ""), config("llama", r#", "tie_word_embeddings": true"#), config("gemma2", "")] {
        let model = OpenModel::from_config(&config, Box::new(invent(&config))).unwrap();
        let mut whole = load_model(Reference::new(), &model).unwrap();
        let step = batch(&[3, 1, 4, 1, 5], 0, model.spec.kv_groups().len());
        let expected = logits(&mut whole, &step);

        let parts = [
            Stage { layers: 0..1, embeds: true, ends: false },
            Stage::layers(1..2),
            Stage { layers: 2..3, embeds: false, ends: true },
        ];
        let mut stream = Vec::new();
        for part in parts {
            let mut decoder = stage(Reference::new(), &model, &part);
            let step = batch(&step.tokens, 0, decoder.spec().kv_groups().len());
            match part.embeds {
                true => decoder.forward(&step).unwrap(),
                false => decoder.forward_from(&step, &stream).unwrap(),
            }
            decoder.stream(5, &mut stream);
            if part.ends {
                let mut found = Vec::new();
                decoder.logits(&mut found);
                assert_eq!(found, expected);
            }
        }
    }
}

#[test]
fn a_stream_of_another_size_is_refused() {
    let config = config("llama", "");
    let model = OpenModel::from_config(&config, Box::new(invent(&config))).unwrap();
    let mut decoder = stage(Reference::new(), &model, &Stage::layers(0..2));
    let error = decoder.forward_from(&batch(&[1, 2], 0, 1), &[0.0; 64]).unwrap_err().to_string();
    assert_eq!(error, "a stream of hidden states has 64 entries, but 128 were expected");
}
