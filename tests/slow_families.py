"""Every family pair by pair, on LAVIS's own modules; only the masking of MLM is the package's."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lavis_mafa.algorithm.losses.language import mask_tokens


class TableConD:
    """Con-D by a fixed rule on the numbers of image and text, so that every verdict occurs."""

    def __init__(self):
        self.judged = set()

    def probability(self, image, text):
        return ((image * 7 + text * 3) % 11) / 10

    def judge(self, samples, image_of, text_of, ranks=None, seen=None):
        self.judged |= set(zip(image_of.tolist(), text_of.tolist(), strict=True))
        return self.probability(image_of, text_of)


class SlowAlbef:
    def __init__(self, model, samples):
        self.model, self.captions = model, samples["text_input"]
        self.tokens = model.tokenizer(
            self.captions,
            padding="longest",
            truncation=True,
            max_length=model.max_txt_len,
            return_tensors="pt",
        )
        self.image_embeddings = self.embed_images(samples["image"])
        self.size = len(self.captions)
        self.encode()

    def embed_images(self, images):
        return self.model.visual_encoder(images)

    def ids(self, j, first=None):
        ids = self.tokens.input_ids[j : j + 1].clone()
        if first is not None:
            ids[:, 0] = first
        return ids

    def mask(self, j):
        return self.tokens.attention_mask[j : j + 1]

    def cross_attention(self, i):
        return {
            "encoder_hidden_states": self.image_embeddings[i : i + 1],
            "encoder_attention_mask": torch.ones(
                1, self.image_embeddings.shape[1], dtype=torch.long
            ),
            "return_dict": True,
        }

    def encode(self):
        model, bert = self.model, self.model.text_encoder.bert
        self.text = bert(
            self.tokens.input_ids,
            attention_mask=self.tokens.attention_mask,
            return_dict=True,
            mode="text",
        ).last_hidden_state
        self.v = [
            F.normalize(model.vision_proj(self.image_embeddings[b, 0]), dim=0)
            for b in self.indices()
        ]
        self.t = [F.normalize(model.text_proj(self.text[b, 0]), dim=0) for b in self.indices()]

    def indices(self):
        return range(self.size)

    def similarity(self, v, t):
        return v @ t

    def fuse(self, i, j):
        out = self.model.text_encoder.bert(
            encoder_embeds=self.text[j : j + 1],
            attention_mask=self.mask(j),
            mode="fusion",
            **self.cross_attention(i),
        )
        return self.model.itm_head(out.last_hidden_state[0, 0])

    def token_losses(self, pairs):
        """Return the losses of all predicted tokens of all pairs, concatenated."""
        model = self.model
        # The step masks all pairs at once; the same call makes the same random draws.
        ids, labels = mask_tokens(
            self.tokens.input_ids[[j for _, j in pairs]],
            model.mlm_probability,
            model.tokenizer.mask_token_id,
            model.text_encoder.config.vocab_size,
            (model.tokenizer.cls_token_id, model.tokenizer.pad_token_id),
        )
        token_losses = []
        for row, (i, j) in enumerate(pairs):
            logits = model.text_encoder(
                ids[row : row + 1],
                attention_mask=self.mask(j),
                return_logits=True,
                **self.cross_attention(i),
            )[0]
            masked = labels[row] != -100
            token_losses.append(
                F.cross_entropy(logits[masked], labels[row][masked], reduction="none")
            )
        return torch.cat(token_losses)


class SlowBlip(SlowAlbef):
    def encode(self):
        model = self.model
        self.text = model.text_encoder.forward_text(self.tokens).last_hidden_state
        self.v = [
            F.normalize(model.vision_proj(self.image_embeddings[b, 0]), dim=0)
            for b in self.indices()
        ]
        self.t = [F.normalize(model.text_proj(self.text[b, 0]), dim=0) for b in self.indices()]

    def fuse(self, i, j):
        ids = self.ids(j, self.model.tokenizer.enc_token_id)
        out = self.model.text_encoder(ids, attention_mask=self.mask(j), **self.cross_attention(i))
        return self.model.itm_head(out.last_hidden_state[0, 0])

    def token_losses(self, pairs):
        token_losses = []
        for i, j in pairs:
            ids = self.ids(j, self.model.tokenizer.bos_token_id)
            logits = self.model.text_decoder(
                ids, attention_mask=self.mask(j), **self.cross_attention(i)
            ).logits
            token_losses.append(next_tokens(logits[0], ids[0], self.mask(j)[0]))
        return torch.cat(token_losses)


class SlowBlip2(SlowAlbef):
    def embed_images(self, images):
        return self.model.ln_vision(self.model.visual_encoder(images))

    def encode(self):
        model = self.model
        text = model.Qformer.bert(
            self.tokens.input_ids, attention_mask=self.tokens.attention_mask, return_dict=True
        ).last_hidden_state
        self.asked = [
            model.Qformer.bert(
                query_embeds=model.query_tokens, use_cache=True, **self.cross_attention(b)
            )
            for b in self.indices()
        ]
        self.v = [
            F.normalize(model.vision_proj(masked.last_hidden_state[0]), dim=-1)
            for masked in self.asked
        ]
        self.t = [F.normalize(model.text_proj(text[b, 0]), dim=0) for b in self.indices()]

    def similarity(self, v, t):
        return torch.stack([query @ t for query in v]).max()

    def fuse(self, i, j):
        queries = self.model.query_tokens
        visible = torch.ones(queries.shape[:2], dtype=torch.long)
        out = self.model.Qformer.bert(
            self.ids(j),
            query_embeds=queries,
            attention_mask=torch.cat([visible, self.mask(j)], dim=1),
            **self.cross_attention(i),
        ).last_hidden_state
        each = [self.model.itm_head(out[0, q]) for q in range(queries.shape[1])]
        return torch.stack(each).mean(dim=0)

    def token_losses(self, pairs):
        token_losses = []
        visible = torch.ones(self.model.query_tokens.shape[:2], dtype=torch.long)
        for i, j in pairs:
            ids = self.ids(j, self.model.tokenizer.bos_token_id)
            logits = self.model.Qformer(
                ids,
                attention_mask=torch.cat([visible, self.mask(j)], dim=1),
                past_key_values=self.asked[i].past_key_values,
                return_dict=True,
            ).logits
            token_losses.append(next_tokens(logits[0], ids[0], self.mask(j)[0]))
        return torch.cat(token_losses)


def next_tokens(logits, ids, mask):
    """Return the loss of every token but the first, with label smoothing 0.1."""
    losses = []
    for position in range(1, int(mask.sum())):
        log_p = torch.log_softmax(logits[position - 1], dim=0)
        losses.append(-0.9 * log_p[ids[position]] - 0.1 * log_p.mean())
    return torch.stack(losses)


SLOW = {"albef_mafa": SlowAlbef, "blip_mafa": SlowBlip, "blip2_mafa": SlowBlip2}
