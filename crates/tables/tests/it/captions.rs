//! Captions: found by digest and encoder, read alone.

use tables::*;

fn caption(text: &str, encoder: &str, tokens: i32, width: i32) -> Caption {
    let bytes = |n: i32, salt: u8| (0..n).map(|k| (k as u8).wrapping_mul(31).wrapping_add(salt)).collect::<Vec<u8>>();
    let salt = text.bytes().chain(encoder.bytes()).fold(0, u8::wrapping_add);
    Caption {
        caption_digest: caption_digest(text),
        text: text.into(),
        encoder: encoder.into(),
        tokens,
        width,
        text_tokens: 7,
        max_tokens: 512,
        item_key: format!("{text}/{encoder}"),
        embedding: (tokens > 0).then(|| bytes(2 * tokens * width, salt)),
        pooled: (encoder == "clip").then(|| bytes(2 * width, salt)),
    }
}

fn meta() -> TextMeta {
    TextMeta { encoders: [("t5".into(), "1".into()), ("clip".into(), "2".into())].into(), max_tokens: 512 }
}

#[test]
fn a_caption_is_found_by_text_and_encoder() {
    let folder = tempfile::tempdir().unwrap();
    let mut rows = Vec::new();
    for text in ["", "a trtcrd", "日本語 🂡"] {
        rows.push(caption(text, "t5", 16, 64));
        rows.push(caption(text, "clip", 0, 48));
    }
    for (part, rows) in rows.chunks(2).enumerate() {
        let path = folder.path().join(format!("captions/part-{part:05}.parquet"));
        let mut writer = CaptionsWriter::create(&path, &meta()).unwrap();
        for row in rows {
            writer.push(row.clone()).unwrap();
        }
        writer.finish().unwrap();
    }
    let captions = CaptionReader::open(&folder.path().join("captions")).unwrap();
    assert_eq!(captions.meta(), &meta());
    assert_eq!(captions.encoders().into_iter().collect::<Vec<_>>(), ["clip", "t5"]);
    for row in &rows {
        assert_eq!(&captions.get(&row.caption_digest, &row.encoder).unwrap(), row);
        assert!(captions.contains(&row.caption_digest, &row.encoder));
    }
    let infos: Vec<_> = captions.infos().map(|row| row.unwrap().1).collect();
    assert_eq!(infos, rows.iter().map(Caption::info).collect::<Vec<_>>());
    let error = captions.get(&caption_digest(""), "bert").unwrap_err();
    assert!(error.to_string().contains("no `bert` embedding of caption"), "{error}");
    assert!(captions.get(&caption_digest("other"), "t5").is_err());
}

#[test]
fn a_caption_may_not_be_there_twice() {
    let folder = tempfile::tempdir().unwrap();
    for part in ["a.parquet", "b.parquet"] {
        let mut writer = CaptionsWriter::create(&folder.path().join(part), &meta()).unwrap();
        writer.push(caption("x", "t5", 2, 4)).unwrap();
        writer.finish().unwrap();
    }
    let error = CaptionReader::open(folder.path()).err().unwrap().to_string();
    assert!(error.contains("is there twice for `t5`"), "{error}");
}

#[test]
fn several_threads_read_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("part-00000.parquet");
    let rows: Vec<Caption> = (0..24).map(|i| caption(&format!("caption {i}"), "t5", 64, 512)).collect();
    let mut writer = CaptionsWriter::create(&path, &meta()).unwrap();
    for row in &rows {
        writer.push(row.clone()).unwrap();
    }
    writer.finish().unwrap();
    let captions = CaptionReader::open(&path).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (captions, rows) = (&captions, &rows);
            scope.spawn(move || {
                for row in rows.iter().cycle().skip(thread * 5).take(rows.len()) {
                    assert_eq!(&captions.get(&row.caption_digest, "t5").unwrap(), row);
                }
            });
        }
    });
}

#[test]
fn a_row_that_contradicts_itself_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = CaptionsWriter::create(&folder.path().join("c.parquet"), &meta()).unwrap();
    let good = caption("a", "clip", 4, 8);
    let mut refused = |change: &dyn Fn(&mut Caption)| {
        let mut row = good.clone();
        change(&mut row);
        writer.push(row).unwrap_err().to_string()
    };
    let digest = &good.caption_digest;
    assert_eq!(
        refused(&|row| row.tokens = 5),
        format!("captions row `{digest}`: `embedding` has 64 bytes, but 5 x 8 numbers in bf16 make 80")
    );
    assert!(refused(&|row| row.pooled = Some(vec![0; 3])).contains("`pooled` has 3 bytes"));
    assert!(refused(&|row| row.text = "b".into()).contains("not that of its text"));
    assert!(refused(&|row| (row.pooled, row.embedding) = (None, None)).contains("neither"));
    assert!(refused(&|row| row.width = -1).contains("negative"));
}
